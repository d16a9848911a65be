"""The real scheduler, executor and model behind `noria.replay`, its time measured. Knows no HTTP and no store.

Several replays over one model take turns by the iteration, so that whatever slows the machine slows them alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import perf_counter

import torch

from noria.engine.config import EngineConfig, Kernels
from noria.engine.execution.executor import LocalExecutor
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.step import RowInput, RowOutput, Sampling, StepInput
from noria.engine.models.load import load
from noria.engine.plan import plan
from noria.engine.scheduling.batch import Batch, BatchRow
from noria.engine.trace import IterationLog, Times, TraceStart
from noria.engine.wire.messages import SamplingParams
from noria.replay import Arrival, Replay, Result
from noria.simulation import Engine

GREEDY = SamplingParams(max_tokens=1, temperature=0)


class RealEngine:
    """One model in this process; each replay has a scheduler, KV pools and an executor of its own."""

    def __init__(self, model: str, threads: int = 0, kernels: Kernels = "auto") -> None:
        self._plan = plan(EngineConfig(model=model, threads=threads, kernels=kernels))
        torch.set_num_threads(threads or os.cpu_count() or 1)
        self.name = self._plan.name
        self._model = load(self._plan.source, self._plan.ops).model

    def replay(
        self, policy: str, rate: float, settings: Engine, arrivals: Sequence[Arrival], log: Path
    ) -> MeasuredReplay:
        """`rate` is noted in the result."""
        spec = self._plan.spec
        pools = self._plan.ops.new_kv_pools(
            spec.num_layers,
            settings.num_blocks,
            settings.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            torch.float32,
        )
        runner = ModelRunner(self._model, pools, settings.block_size)
        runner.execute(StepInput([RowInput([0], 0, [0], None)], 0))  # the first call pays for lazy set-up
        start = TraceStart(
            self.name,
            policy,
            settings.max_batch_size,
            settings.max_batch_tokens,
            settings.max_chunk_tokens,
            settings.num_blocks,
            settings.block_size,
            time.time(),
        )
        return MeasuredReplay(
            LocalExecutor(runner.execute),
            settings,
            policy,
            rate,
            arrivals,
            IterationLog(log, start),
            vocab_size=spec.vocab_size,
            end=spec.eos_token_ids[0],
        )


class MeasuredReplay:
    """A replay whose clock is the engine's own: what an iteration took, the scheduler included."""

    def __init__(
        self,
        executor: LocalExecutor,
        settings: Engine,
        policy: str,
        rate: float,
        arrivals: Sequence[Arrival],
        log: IterationLog,
        *,
        vocab_size: int,
        end: int,
    ) -> None:
        self._executor = executor
        self._log = log
        self._end = end
        self._scheduler = settings.scheduler(policy)
        self._last: tuple[Batch, list[RowOutput], float] | None = None

        def prompt(arrival: Arrival) -> list[int]:
            chance = Random(arrival.name)
            return [chance.randrange(1, vocab_size) for _ in range(arrival.prompt)]

        self._replay = Replay(self._scheduler, rate, arrivals, self._run, prompt=prompt, end=end)

    def step(self) -> bool:
        started = perf_counter()
        more = self._replay.step()
        seconds = perf_counter() - started
        if self._last is not None:
            batch, outputs, forward = self._last
            self._last = None
            self._replay.clock += seconds - forward  # select and complete
            self._log.record(batch, outputs, self._scheduler, Times(seconds - forward, forward))
        return more

    def finish(self) -> Result:
        try:
            while self.step():
                pass
            return self._replay.finish()
        finally:
            self._executor.close()
            self._log.close()

    def _run(self, batch: Batch) -> tuple[float, list[tuple[int, ...]]]:
        started = perf_counter()
        outputs = self._executor.run(StepInput([self._row(row) for row in batch.rows], batch.num_decode_rows))
        forward = perf_counter() - started
        if failed := [output.error for output in outputs if output.error]:
            raise RuntimeError(failed[0])
        self._last = batch, outputs, forward
        return forward, [output.token_ids for output in outputs]

    def _row(self, row: BatchRow) -> RowInput:
        request, end = row.request, row.start + row.num_tokens
        # The workload says where a request ends, so the model must not.
        sampling = Sampling(GREEDY, position=request.num_tokens, banned=(self._end,)) if row.samples else None
        return RowInput(request.tokens[row.start : end], row.start, request.blocks, sampling)


def run_together(replays: Sequence[MeasuredReplay]) -> list[Result]:
    """All of them, an iteration each in turn."""
    going = list(replays)
    while going:
        going = [replay for replay in going if replay.step()]
    return [replay.finish() for replay in replays]
