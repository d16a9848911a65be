"""Takes steps in order and gives their results back in order, while the caller goes on.

The one seam between the loop and where the computing happens. Knows no policy and no transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from noria.engine.execution.step import RowOutput, StepInput


class LocalExecutor:
    """Runs steps one after the other on a thread of this process; torch leaves the interpreter lock while it computes.

    `depth` is the number of steps that may be out at once: Orca's n_workers, the pipeline stages.
    """

    depth = 1

    def __init__(self, execute: Callable[[StepInput], list[RowOutput]]) -> None:
        self._execute = execute
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noria-step")
        self._out: deque[Future[list[RowOutput]]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._out)

    def submit(self, step: StepInput) -> None:
        self._out.append(self._pool.submit(self._execute, step))

    def collect(self) -> list[RowOutput]:
        """Wait for the oldest step out. Raises what it raised."""
        return self._out.popleft().result()

    def run(self, step: StepInput) -> list[RowOutput]:
        """Compute one step now, apart from those out."""
        return self._pool.submit(self._execute, step).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
