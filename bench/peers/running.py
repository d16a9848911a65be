"""A server as a group of processes: started, ready, measured in CPU time and memory, ended.

Knows processes; not what they serve.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

READY_SECONDS = 240.0
STOP_SECONDS = 20.0


class Failed(Exception):
    """A server did not start: its last line."""


class Running:
    """Its `pid` leads a session of its own, so that whatever it starts ends with it."""

    def __init__(self, command: Sequence[str], port: int, ready: str, environment: dict[str, str], log: Path) -> None:
        self._log = log
        began = time.monotonic()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, **environment}, start_new_session=True
            )
        try:
            self._wait(f"http://127.0.0.1:{port}{ready}", environment.get("NORIA_API_KEY", ""))
        except BaseException:  # told to end while it starts
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began

    def _wait(self, url: str, key: str) -> None:
        until = time.monotonic() + READY_SECONDS
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        self.stop()
        said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise Failed(f"{said[-1].strip()[:200]}; all of it: {self._log}")

    def _tree(self) -> list[psutil.Process]:
        if self._process.poll() is not None:
            return []
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Of all its processes that live, and of those that they have seen end."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])  # user, system, and both of children that were waited for
        return total

    def memory(self) -> int:
        """Resident bytes, what its processes share counted once."""
        total = 0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):  # it ended since, or has ended and nobody has asked how
                total += process.memory_full_info().pss
        return total

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(STOP_SECONDS)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def machine_seconds() -> float:
    """CPU time that everything on this machine has taken."""
    t = psutil.cpu_times()
    return float(t.user + t.nice + t.system + t.irq + t.softirq + t.steal)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
