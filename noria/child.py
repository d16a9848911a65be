"""One child process: how it is started, how its lines are read, how it is made to leave nothing behind.

Knows no policy: when to start, to restart or to stop is the supervisor's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class ChildSpec:
    """How to run one child. `ready` holds back the children after it, and ending before it is ready is final."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stop_seconds: float  # from SIGTERM to SIGKILL
    ready: Callable[[], bool] | None = None
    last_words: Callable[[], str] | None = None  # why it ended, for one whose own output goes to a file
    orphan_signal: signal.Signals = signal.SIGKILL  # sent by the kernel when the supervisor itself is killed
    reloads: bool = False  # reads its settings again on SIGHUP
    inherit_fds: tuple[int, ...] = ()
    on_progress: Callable[[str], None] | None = None  # gets each line that the child writes to NORIA_PROGRESS_FD
    on_error_line: Callable[[str], None] | None = None  # gets each line of its standard error, else inherited


class Child:
    """A started process. Lines are handed over whenever `selector` is read with `read_lines`."""

    def __init__(self, spec: ChildSpec, selector: selectors.BaseSelector) -> None:
        """Raises OSError when the program cannot be started."""
        self.spec = spec
        self._selector = selector
        self._pipes: list[_LinePipe] = []
        env, fds = dict(spec.env), list(spec.inherit_fds)
        write_end: int | None = None
        if spec.on_progress is not None:
            read_end, write_end = os.pipe()
            env["NORIA_PROGRESS_FD"] = str(write_end)
            fds.append(write_end)
            self._listen(os.fdopen(read_end, "rb", buffering=0), spec.on_progress)
        try:
            self._process = subprocess.Popen(
                spec.argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if spec.on_error_line else None,
                bufsize=0,
                pass_fds=fds,
                process_group=0,  # a terminal's Ctrl-C reaches the supervisor alone, which keeps the order
                preexec_fn=_die_with_parent(os.getpid(), spec.orphan_signal),
            )
        finally:
            if write_end is not None:
                os.close(write_end)
        if spec.on_error_line is not None and self._process.stderr is not None:
            self._listen(self._process.stderr, spec.on_error_line)

    @property
    def pid(self) -> int:
        """The process id, which is the id of its process group too."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """SIGTERM, to the child alone: what it started itself is its own to stop."""
        self._process.terminate()

    def ask_to_reload(self) -> None:
        """SIGHUP."""
        self._process.send_signal(signal.SIGHUP)

    def bury(self) -> None:
        """End it at once if it still runs, with everything in its process group, and hand over its last lines."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in self._pipes:
            pipe.close(self._selector)
        self._pipes.clear()

    def _listen(self, stream: IO[bytes], sink: Callable[[str], None]) -> None:
        pipe = _LinePipe(stream, sink)
        self._pipes.append(pipe)
        self._selector.register(stream, selectors.EVENT_READ, pipe)


def read_lines(selector: selectors.BaseSelector, timeout: float) -> None:
    """Wait up to `timeout` seconds for lines of any child, and hand them over."""
    for key, _ in selector.select(timeout):
        if not key.data.read():
            selector.unregister(key.fileobj)


class _LinePipe:
    """Cuts a stream of bytes into lines for `sink`."""

    def __init__(self, stream: IO[bytes], sink: Callable[[str], None]) -> None:
        os.set_blocking(stream.fileno(), False)
        self._stream = stream
        self._sink = sink
        self._rest = b""

    def read(self) -> bool:
        """Hand over what has come; False at the end of the stream."""
        while chunk := self._stream.read(65536):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._sink(line.decode(errors="replace"))
        return chunk is None  # None: nothing more for now; empty: closed at the other end

    def close(self, selector: selectors.BaseSelector) -> None:
        """Hand over the rest, its unfinished last line included."""
        self.read()
        if self._rest:
            self._sink(self._rest.decode(errors="replace"))
        with contextlib.suppress(KeyError):
            selector.unregister(self._stream)
        self._stream.close()


def _die_with_parent(parent: int, orphan_signal: signal.Signals) -> Callable[[], None] | None:
    """To run in the child before its program: the kernel signals it when the supervisor dies, however it dies."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(orphan_signal), 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask
