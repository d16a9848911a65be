"""Takes steps in order and gives their results back in order, while the caller goes on.

The one seam between the loop and where the computing happens. Knows no policy and no transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from noria.engine.execution.step import RowOutput, StepInput


class RankLost(Exception):
    """A rank of this model died, hangs or cannot go on: this engine cannot compute any more. The message names it."""


class Executor(Protocol):
    """Everything but `close` raises RankLost once a rank is lost; other faults are those of a step alone."""

    @property
    def depth(self) -> int:
        """Steps that may be out at once: Orca's n_workers, the pipeline stages."""

    @property
    def in_flight(self) -> int:
        """Steps that are out."""

    def check(self) -> None:
        """Raises RankLost where that has happened."""

    def submit(self, step: StepInput) -> None:
        """Start a step."""

    def collect(self) -> list[RowOutput]:
        """Wait for the oldest step out. Raises what went wrong in it."""

    def run(self, step: StepInput) -> list[RowOutput]:
        """Compute one step now, apart from those out. Raises what went wrong in it."""

    def close(self) -> None:
        """Let go of threads and processes."""


class LocalExecutor:
    """Runs steps one after the other on a thread of this process; torch leaves the interpreter lock while it computes.
    See `Executor`."""

    depth = 1

    def __init__(self, execute: Callable[[StepInput], list[RowOutput]]) -> None:
        self._execute = execute
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noria-step")
        self._out: deque[Future[list[RowOutput]]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._out)

    def check(self) -> None:
        pass

    def submit(self, step: StepInput) -> None:
        self._out.append(self._pool.submit(self._execute, step))

    def collect(self) -> list[RowOutput]:
        return self._out.popleft().result()

    def run(self, step: StepInput) -> list[RowOutput]:
        return self._pool.submit(self._execute, step).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
