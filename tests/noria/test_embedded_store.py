"""The embedded store, run by the supervisor as `noria serve` runs it, and talked to through a real client."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from noria.embedded_store import SOCKET_PATH_MAX, EmbeddedStore, StoreError, open_store

ROOT = Path(__file__).parents[2]
DEADLINE = 15.0


def eventually(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up, f"not within {DEADLINE} s: {what}"
        time.sleep(0.02)


def close(store: EmbeddedStore) -> None:
    os.close(store.lock_fd)


@contextmanager
def running(store: EmbeddedStore) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(store.argv, pass_fds=[store.lock_fd])
    try:
        eventually(store.answers, "the store answers")
        yield process
    finally:
        process.terminate()
        process.wait(DEADLINE)


def test_it_answers_on_its_socket_alone_with_the_settings_that_matter(tmp_path: Path) -> None:
    store = open_store(tmp_path / "state")
    assert not store.answers()
    with running(store):
        client = redis.Redis.from_url(store.url, protocol=2)
        wanted = {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": "",
            "dir": str(tmp_path / "state"),
        }
        found = client.config_get(*wanted)
        assert {key: found[key] for key in wanted} == wanted
        assert stat.S_IMODE(store.socket_path.stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    close(store)


def test_what_was_written_is_there_after_a_restart_and_after_a_kill(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with running(store):
        redis.Redis.from_url(store.url, protocol=2).set("a", "1")
    close(store)

    store = open_store(tmp_path)
    with running(store) as process:
        client = redis.Redis.from_url(store.url, protocol=2)
        assert client.get("a") == b"1"
        client.set("b", "2")
        assert client.waitaof(1, 0, 5000)[0] == 1  # on disk
        process.kill()
        process.wait()
        assert store.socket_path.exists()  # stale
    close(store)

    store = open_store(tmp_path)
    with running(store):
        assert redis.Redis.from_url(store.url, protocol=2).get("b") == b"2"
    close(store)


def test_a_folder_in_use_is_refused_at_once_with_the_owner_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    began = time.monotonic()
    with pytest.raises(StoreError, match=rf"Another noria serve \(process {os.getpid()}\).*--state-dir"):
        open_store(tmp_path)
    assert time.monotonic() - began < 2
    close(store)
    close(open_store(tmp_path))


def test_a_store_that_outlives_its_owner_is_waited_for(tmp_path: Path) -> None:
    """The lock lies with the server too, so that one folder never has two servers writing to it."""
    owner = textwrap.dedent(
        f"""
        import subprocess
        from pathlib import Path
        from noria.embedded_store import open_store
        store = open_store(Path({str(tmp_path)!r}))
        process = subprocess.Popen(store.argv, pass_fds=[store.lock_fd], stdout=subprocess.DEVNULL)
        while not store.answers(): pass
        print(process.pid, flush=True)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", owner],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=DEADLINE,
    )
    server = int(done.stdout)
    try:
        began = time.monotonic()
        with pytest.raises(StoreError, match="Another noria serve"):
            open_store(tmp_path, wait_seconds=0.3)
        assert time.monotonic() - began >= 0.3
        subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -TERM {server}"])
        store = open_store(tmp_path)
        with running(store):
            assert store.answers()
        close(store)
    finally:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


@pytest.mark.parametrize("name", ['with space and % and "quote"', "x" * 120])
def test_any_folder_will_do(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a URL or a configuration file would misread, and paths too long for a socket."""
    short = tmp_path / "run"
    short.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    store = open_store(tmp_path / name)
    assert len(os.fsencode(store.socket_path)) <= SOCKET_PATH_MAX
    with running(store):
        client = redis.Redis.from_url(store.url, protocol=2)
        client.set("a", "1")
        assert client.get("a") == b"1"
    assert (tmp_path / name / "appendonlydir").is_dir()
    close(store)


def test_a_short_socket_folder_that_leads_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "run"
    short.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    store = open_store(tmp_path / ("y" * 120))
    close(store)
    store.socket_path.parent.rmdir()
    store.socket_path.parent.symlink_to(tmp_path)
    with pytest.raises(StoreError, match="belongs to somebody else"):
        open_store(tmp_path / ("y" * 120))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used: Not a directory"):
        open_store(tmp_path / "file" / "state")


def test_a_broken_file_is_told_by_its_last_words(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with running(store):
        redis.Redis.from_url(store.url, protocol=2).set("a", "1")
    for part in (tmp_path / "appendonlydir").glob("*.aof"):
        part.write_bytes(b"no such format\n" * 10)
    process = subprocess.Popen(store.argv, pass_fds=[store.lock_fd])
    assert process.wait(DEADLINE) == 1
    assert "append only file" in store.last_log_line().lower()
    close(store)
