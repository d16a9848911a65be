"""Counts what the engine does, for /metrics. Written by the loop alone, read as one frozen record.

Knows no Prometheus and no Redis.
"""

from __future__ import annotations

import time
from bisect import bisect_left

from noria.engine.adapters import Adapters
from noria.engine.grammar.grammars import GrammarCounts
from noria.engine.scheduling.batch import Batch, Progress
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.trace import Times
from noria.engine.waiting_room import WaitingRoom
from noria.engine.wire.messages import ITERATION_ROWS, ITERATION_SECONDS, EngineStats, FinishReason
from noria.kernels.compiles import Compiles

PUBLISH_EVERY = 0.25  # seconds; and always when the engine becomes idle, so that gauges fall to zero


class Statistics:
    """Counters since the start; gauges are read off the scheduler when the record is made."""

    def __init__(
        self,
        scheduler: Scheduler,
        waiting: WaitingRoom,
        grammars: GrammarCounts,
        compiles: Compiles,
        adapters: Adapters | None,
    ) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self._grammars = grammars
        self._compiles = compiles
        self._adapters = adapters
        self._published = 0.0
        self._was_idle = False
        self.latest = EngineStats()  # as published last; other threads may read it
        self.draining = False  # set by the loop once it claims nothing more
        self._batch_size = self._batch_tokens = 0
        self._iterations = self._prompt_tokens = self._generation_tokens = self._cached_tokens = 0
        self._finished = self._failed = 0
        self._iteration_seconds = [0] * (len(ITERATION_SECONDS) + 1)
        self._iteration_rows = [0] * (len(ITERATION_ROWS) + 1)
        self._rows = 0
        self._seconds = Times(0.0, 0.0)

    def count_step(self, batch: Batch, times: Times) -> None:
        self._iterations += 1
        self._rows += len(batch.rows)
        self._seconds += times
        self._iteration_seconds[bisect_left(ITERATION_SECONDS, times.forward)] += 1
        self._iteration_rows[bisect_left(ITERATION_ROWS, len(batch.rows))] += 1
        self._batch_size = len(batch.rows)
        self._batch_tokens = batch.num_tokens
        self._prompt_tokens += batch.num_prompt_tokens

    def count_tokens(self, progress: Progress) -> None:
        request = progress.request
        is_first = request.num_output == len(progress.new_tokens)
        if is_first and (progress.new_tokens or progress.finish):
            self._cached_tokens += request.num_cached
        self._generation_tokens += len(progress.new_tokens)

    def count_end(self, reason: FinishReason) -> None:
        if reason in (FinishReason.ERROR, FinishReason.OVERLOADED):
            self._failed += 1
        else:
            self._finished += 1

    def due(self) -> EngineStats | None:
        """A record when it is time to publish one."""
        now = time.monotonic()
        idle = len(self._scheduler) == 0
        if now - self._published < PUBLISH_EVERY and not (idle and not self._was_idle):
            return None
        self._published, self._was_idle = now, idle
        self.latest = self.record()
        return self.latest

    def record(self) -> EngineStats:
        scheduler, kv, adapters = self._scheduler, self._scheduler.kv, self._adapters
        idle = len(scheduler) == 0
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._waiting),
            batch_size=0 if idle else self._batch_size,
            batch_tokens=0 if idle else self._batch_tokens,
            kv_blocks_total=kv.num_blocks,
            kv_blocks_used=kv.num_held,
            kv_blocks_cached=kv.num_cached,
            iterations_total=self._iterations,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            cached_tokens_total=self._cached_tokens,
            memory_preemptions_total=scheduler.preemptions.memory,
            class_preemptions_total=scheduler.preemptions.urgency,
            recomputed_tokens_total=scheduler.preemptions.recomputed,
            drafted_tokens_total=scheduler.speculation.drafted,
            accepted_tokens_total=scheduler.speculation.accepted,
            requests_finished_total=self._finished,
            requests_failed_total=self._failed,
            iteration_seconds=tuple(self._iteration_seconds),
            iteration_seconds_sum=round(self._seconds.forward, 6),
            iteration_rows=tuple(self._iteration_rows),
            iteration_rows_sum=self._rows,
            select_seconds_total=round(self._seconds.select, 6),
            exchange_seconds_total=round(self._seconds.exchange, 6),
            draining=self.draining,
            grammars_compiled_total=self._grammars.compiled,
            grammars_failed_total=self._grammars.failed,
            grammar_cache_hits_total=self._grammars.hits,
            grammar_seconds_total=round(self._grammars.seconds, 6),
            kernel_compiles_total=self._compiles.num,
            adapters=0 if adapters is None else len(adapters.loaded),
            adapter_bytes=0 if adapters is None else adapters.num_bytes,
            adapter_loads_total=0 if adapters is None else adapters.counts.loads,
            adapter_load_failures_total=0 if adapters is None else adapters.counts.failures,
        )
