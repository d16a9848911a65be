"""A store, engines and gateways as real processes, to be killed, stopped and started again by benches and tests.

Knows signals and command lines; not what is asked of the processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from bench.store import command

ROOT = Path(__file__).parents[1]
KEY = "sk-cluster"


class Part:
    """One process that can be started again with the same command."""

    def __init__(
        self, name: str, argv: list[str], env: dict[str, str], folder: Path, ready: Callable[[], bool]
    ) -> None:
        self.name = name
        self.stopped = False  # by SIGSTOP
        self._life_begins = 0  # place in the log
        self._argv, self._env, self._ready = argv, env, ready
        self.log_path = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._life_begins = log.tell()
            self._process = subprocess.Popen(self._argv, env=self._env, cwd=ROOT, stdout=log, stderr=log)
        self.stopped = False

    @property
    def pid(self) -> int:
        """Of the life that runs. Raises RuntimeError before the first."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_ready(self) -> bool:
        return self.alive and not self.stopped and self._ready()

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self.alive:
            self._process.send_signal(number)
            self.stopped = {signal.SIGSTOP: True, signal.SIGCONT: False}.get(number, self.stopped)

    def wait(self, seconds: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        return 0 if self._process is None else self._process.wait(seconds)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait(20)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_of_this_life(self) -> str:
        """What it has written since its last start."""
        return self.log_path.read_bytes()[self._life_begins :].decode(errors="replace")


class Gateway(Part):
    """`url` is where it listens."""

    url: str = ""


class Cluster:
    """Everything of one run in a folder of its own; nothing is left of it at the end. Use as `with`."""

    def __init__(
        self,
        model: str | Path,
        *,
        num_engines: int = 2,
        num_gateways: int = 2,
        lease_seconds: float = 2.0,
        engine_options: tuple[str, ...] = (),
        gateway_options: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        start_seconds: float = 120.0,
    ) -> None:
        self._start_seconds = start_seconds
        self.folder = Path(tempfile.mkdtemp(prefix="noria-cluster-"))  # short: a socket's path has 107 bytes
        self.store_url = f"unix://{self.folder}/data/store.sock"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
        self._env = {**kept, "PYTHONPATH": str(ROOT), "NORIA_REDIS_URL": self.store_url, "NORIA_API_KEY": KEY}
        self._env |= environment or {}
        self.store = self._store()
        self.engines = [
            self.engine(f"engine{i}", model, (f"--lease-seconds={lease_seconds}", *engine_options))
            for i in range(num_engines)
        ]
        self.gateways = [self._gateway(i, gateway_options) for i in range(num_gateways)]

    def __enter__(self) -> Cluster:
        try:
            for part in (self.store, *self.engines, *self.gateways):
                part.start()
            self.await_ready(self._start_seconds)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def parts(self) -> list[Part]:
        return [self.store, *self.engines, *self.gateways]

    def await_ready(self, seconds: float = 120.0) -> None:
        """Until every process is. Raises TimeoutError with its last lines."""
        for part in self.parts:
            wait_until(part.is_ready, seconds, lambda part=part: f"{part.name} is not ready: {part.log()[-2000:]}")  # type: ignore[misc]

    def revive(self) -> None:
        """Start again what ended by itself, as a supervisor does: an engine that finds no store at its start ends."""
        for part in self.parts:
            if not part.alive:
                part.start()

    def close(self) -> None:
        """Kill everything. The folder with the logs goes too."""
        for part in reversed(self.parts):
            part.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _store(self) -> Part:
        folder = self.folder / "data"
        folder.mkdir()
        return Part("store", command(folder), self._env, self.folder, self._store_answers)

    def _store_answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1)
                connection.connect(f"{self.folder}/data/store.sock")
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def engine(
        self, name: str, model: str | Path, options: tuple[str, ...], environment: Mapping[str, str] | None = None
    ) -> Part:
        """An engine on one thread, not started yet."""
        argv = [sys.executable, "-m", "noria", "engine", "--threads=1", *options, str(model)]
        env = {**self._env, **(environment or {})}
        part = Part(name, argv, env, self.folder, lambda: '"serving"' in part.log_of_this_life())
        return part

    def _gateway(self, index: int, options: tuple[str, ...]) -> Gateway:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "noria", "gateway", f"--port={port}", *options]
        part = Gateway(f"gateway{index}", argv, self._env, self.folder, lambda: status(url + "/readyz") == 200)
        part.url = url
        return part


def status(url: str) -> int:
    """HTTP status of a GET; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_until(condition: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    """Poll; raises TimeoutError with the text of `why`."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(why())
        time.sleep(0.05)
