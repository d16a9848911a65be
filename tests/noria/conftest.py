"""A shell on a store: for commands that work on the store itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.store import Store, running_store
from noria.cli import main

PEPPER = "pepper-of-the-shell-0123456789abcdef"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with running_store("valkey") as found:
        yield found


@pytest.fixture
def noria(store, capsys, monkeypatch):
    """Runs `noria WORDS` in this process: exit code, and what it printed."""
    monkeypatch.setenv("NORIA_KEY_PEPPER", PEPPER)
    monkeypatch.setenv("NORIA_REDIS_URL", store.url)

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return run
