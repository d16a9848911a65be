"""One rank's share of the steps: computed in order by a thread, from the stage before and for the stage after.

Knows the two channels' ends by what they do; no processes, no policy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import structlog
import torch
from torch import Tensor

from noria.engine.execution.control import Answer, Broken, Failed
from noria.engine.execution.data_channel import Arriving, ChannelBroken, DataChannel
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.step import StepInput
from noria.engine.parallel import Parallel

log = structlog.get_logger("noria.engine")

Report = Callable[[Answer | Failed | Broken], None]


class EarlierStageFailed(Exception):
    """Hidden states came that no stage computed."""


class Stage:
    """Steps go in at any time; what comes of them is reported by the stage's thread.

    A stage that cannot compute a step says why, sends numbers that are none, and goes on: the others stay in step with
    it, and the last one gives the step up. Where shards share a stage, that holds as long as nothing was exchanged yet:
    one that fails later leaves the others waiting, so it fails for good.
    """

    def __init__(
        self,
        runner: ModelRunner,
        channel: DataChannel,
        parallel: Parallel,
        *,
        width: int,
        dtype: torch.dtype,
        report: Report,
    ) -> None:
        self._runner = runner
        self._channel = channel
        self._parallel = parallel
        self._width = width
        self._dtype = dtype
        self._report = report
        self._queue: SimpleQueue[tuple[int, StepInput, Arriving | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"noria-stage-{parallel.rank}", daemon=True)
        self._thread.start()

    def submit(self, number: int, step: StepInput) -> None:
        """The step's hidden states may start to travel while an earlier step is computed. Called in order."""
        arriving: Arriving | None = None
        if not self._parallel.is_first:
            num_tokens = sum(len(row.token_ids) for row in step.rows)
            try:
                arriving = self._channel.receive((num_tokens, self._width), self._dtype, number)
            except ChannelBroken as error:
                self._report(Broken(str(error)))
                return
        self._queue.put((number, step, arriving))

    def close(self, seconds: float) -> None:
        """End the thread; one that waits for other ranks is left alone after `seconds`."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            number, step, arriving = work
            try:
                self._compute(number, step, None if arriving is None else arriving.wait())
            except ChannelBroken as error:
                self._report(Broken(str(error)))
                return
            except Exception as error:  # of one shard among several: see the class
                log.exception("a rank failed", rank=self._parallel.rank)
                self._report(Failed(f"{type(error).__name__}: {error}"))
                return

    def _compute(self, number: int, step: StepInput, before: Tensor | None) -> None:
        exchanging = False
        try:
            batch = self._runner.flatten(step)
            if self._parallel.is_last and before is not None and bool(before[:, 0].isnan().all()):
                raise EarlierStageFailed("an earlier stage failed")
            exchanging = self._parallel.tp > 1
            hidden = self._runner.hidden(batch, before)
            if not self._parallel.is_last:
                self._channel.send(hidden, number)
            elif self._parallel.samples:
                self._report(Answer(number, self._runner.choose(step, batch, hidden)))
            else:
                self._runner.contribute(step, batch, hidden)
        except ChannelBroken:
            raise
        except Exception as error:
            if exchanging:
                raise
            self._report(Answer(number, [], repr(error)))
            if not self._parallel.is_last:
                num_tokens = sum(len(row.token_ids) for row in step.rows)
                shape = (num_tokens, self._width)
                self._channel.send(torch.full(shape, torch.nan, dtype=self._dtype, device=self._channel.device), number)
