"""`noria config`: is a file sound, and what does everything come to; `--config` reads it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from noria.cli import main


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ, "NORIA_CONFIG"]:
        if name.startswith("NORIA_"):
            monkeypatch.setenv(name, "")  # so that it is put back whatever the command sets
            monkeypatch.delenv(name)


def noria(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_a_sound_file_is_said_to_be_and_a_mistake_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "noria.toml"
    path.write_text("[gateway]\nport = 8123\n[engine]\npolicy = 'orca'\n")
    assert noria(capsys, "config", "check", str(path)) == (0, f"{path}: sound\n", "")
    path.write_text("[gateway]\nport = 99999\n")
    code, _, said = noria(capsys, "config", "check", str(path))
    assert code == 2 and said.startswith(f"noria: {path}: [gateway] port: ")
    path.write_text("[engine]\npolicies = 'orca'\n")
    for command in (
        ("config", "check", str(path)),
        ("engine", "--config", str(path)),
        ("serve", "--config", str(path)),
    ):
        code, _, said = noria(capsys, *command)
        assert code == 2 and "did you mean policy?" in said


def test_what_is_shown_is_a_file_that_says_the_same_and_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "noria.toml"
    path.write_text("[gateway]\nport = 8123\n")
    monkeypatch.setenv("NORIA_API_KEY", "sk-s3cr3t")
    monkeypatch.setenv("NORIA_REDIS_URL", "redis://:s3cr3t@h:1/0")
    monkeypatch.setenv("NORIA_ENGINE_POLICY", "orca")
    _, shown, _ = noria(capsys, "config", "show", str(path))
    assert "s3cr3t" not in shown
    document = tomllib.loads(shown)
    assert document["gateway"]["port"] == 8123 and document["engine"]["policy"] == "orca"
    path.write_text(shown)
    assert noria(capsys, "config", "check", str(path))[0] == 0
