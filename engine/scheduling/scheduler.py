"""Chooses, before every iteration, which requests step and with how many tokens: iteration-level scheduling.

Pure: the same calls give the same plans. Knows no tensors, no transport, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from noria.engine.scheduling.admission import Admission
from noria.engine.scheduling.batch import Batch, BatchRow, Progress
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import Policy
from noria.engine.scheduling.preemption import PreemptionCounts, Room
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.speculation import Drafter, SpeculationCounts

IDLE_ROW_WEIGHT = 2
"""Streams that an idle row counts for when prompts may take more of an iteration. A larger weight is throughput under
overload, a smaller one even streams beside a few long prompts (docs/performance.md)."""


class CannotEverFit(ValueError):
    """The request needs more KV blocks, or a longer context, than this engine has."""


class Scheduler:
    """`waiting` and `running` (admitted) requests, each in order of (class, arrival), are kept by `Admission`.

    The engine calls `add` and `cancel` between iterations, `select` for the next plan and `complete` with what the
    plan's rows sampled. With pipeline stages one plan per stage is out at once; a request is in one of them at most,
    and plans complete in the order of their selection.

    Where the policy cuts prompts, `max_batch_tokens` bounds the tokens of an iteration, and `max_chunk_tokens` (0: the
    same) those of prompts in an iteration in which somebody decodes and would wait for them, unless many rows stand
    idle (`_beside`). The first running request steps, or somebody who is never preempted again does, and whoever
    stands first always fits an empty pool, so `select` gives a plan whenever a request is here and none is in flight.
    """

    def __init__(
        self,
        policy: Policy,
        kv: KVBlocks,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        max_model_len: int,
        max_chunk_tokens: int = 0,
        num_stages: int = 1,
        max_draft: int = 0,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.max_batch_size = min(max_batch_size, max_batch_tokens)  # every row has a token
        self.max_batch_tokens = max_batch_tokens
        self.max_chunk_tokens = max_chunk_tokens or max_batch_tokens
        self.max_model_len = max_model_len
        self.max_draft = max_draft  # guessed tokens of one row at most; 0: no speculation
        self.speculation = SpeculationCounts()
        self.max_running = self.max_batch_size * (1 if policy.closed_batches else num_stages)
        self._num_stages = num_stages
        self._max_rows = self.max_batch_size  # of the batch that is being selected
        self._admission = Admission(policy, kv, self.max_running)
        self.waiting, self.running = self._admission.waiting, self._admission.running
        self._by_id: dict[str, Request] = {}
        self._num_arrivals = 0

    # --- requests in and out -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue `request`. Raises CannotEverFit when no empty engine of this size could run it, ValueError when it
        makes no sense."""
        if not 0 < request.num_prompt <= request.num_tokens <= request.num_total:
            raise ValueError(f"request {request.id} has no prompt, or more output than it asked for")
        total = request.num_total
        if total > self.max_model_len:
            raise CannotEverFit(f"{total} tokens asked for, the context holds {self.max_model_len}")
        at_once = request.num_tokens if self.policy.whole_prompts else 0
        if self.kv.groups.most(total, at_once=at_once) > self.kv.num_blocks:
            size = self.kv.groups.longest(self.kv.num_blocks, total, whole_prompts=self.policy.whole_prompts)
            raise CannotEverFit(f"{total} tokens asked for, the KV memory holds {size}")
        if request.id in self._by_id:
            raise ValueError(f"request {request.id} is already here")
        if self.max_draft:
            request.drafter = Drafter(request.prediction)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._by_id[request.id] = request
        self._admission.wait(request)

    def cancel(self, request_id: str, reason: str = "cancelled") -> Progress | None:
        """End a request. One that is in flight ends at `complete`, which then reports it; others end here."""
        request = self._by_id.get(request_id)
        if request is None or request.finish is not None:
            return None
        request.cancelled = reason
        if request.in_flight:
            return None
        return self._end(request, (), reason)

    def get(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def preemptions(self) -> PreemptionCounts:
        return self._admission.preemptions

    @property
    def is_full(self) -> bool:
        """Whether all places are taken."""
        return len(self.running) >= self.max_running

    def room(self) -> Room:
        """How much the engine may claim so that everything claimed starts at the next iteration."""
        return self._admission.room()

    def rooms(self, num_classes: int) -> list[Room]:
        """`room` for each class: more urgent ones may make others give way."""
        return self._admission.rooms(num_classes)

    def check(self) -> None:
        """Recount blocks and lists; raises AssertionError where they disagree."""
        self._admission.check()
        if sorted(r.id for r in self.running + self.waiting) != sorted(self._by_id):
            raise AssertionError("a request is lost or in two lists")

    # --- one iteration --------------------------------------------------------------------------------------------

    def select(self) -> Batch | None:
        """The next iteration's rows, or None when nothing can step now."""
        self._max_rows = self._row_limit()
        self._admission.admit_urgent()  # their prompts are read below, before those of others
        decodes: list[BatchRow] = []
        prefills: list[BatchRow] = []
        reading, num_guesses = self._select_decodes(decodes)
        budget = self._read_on(reading, prefills, len(decodes), self.max_batch_tokens - len(decodes) - num_guesses)
        self._admit(prefills, len(decodes), budget)
        rows = decodes + prefills
        return Batch(tuple(rows)) if rows else None

    def _row_limit(self) -> int:
        """Who is here is shared out among the stages: a batch that took everybody would leave the other stages idle.
        Not under the baselines, whose batches are the paper's."""
        if self._num_stages == 1 or self.policy.whole_prompts:
            return self.max_batch_size
        here = min(len(self.running) + len(self.waiting), self.max_running)
        return max(1, -(-here // self._num_stages))

    def complete(self, batch: Batch, sampled: Sequence[Sequence[int]]) -> list[Progress]:
        """Fold an iteration's results back. `sampled[i]` are the tokens chosen for row i, none where it does not
        sample; after a draft, the guesses that were right and one more. Finished requests leave here, and their blocks
        are free for the next `select`."""
        progress: list[Progress] = []
        block_size, is_windowed = self.kv.block_size, self.kv.is_windowed
        for (request, start, count, _, samples, is_padding, draft), tokens in zip(batch.rows, sampled, strict=True):
            request.in_flight = False
            if is_padding:
                continue
            kept: tuple[int, ...] = ()
            finish = request.cancelled
            if samples and finish is None:
                kept, finish = request.extend(tokens, self.max_model_len)
            if draft:  # keys and values of wrong guesses are written over
                count += self._count_draft(request, draft, kept) - len(draft)
            request.num_computed = start + count
            if start + count >= (request.num_registered + 1) * block_size:
                self.kv.register(request)
            if is_windowed:
                self.kv.trim(request)
            if finish is None and samples:
                progress.append(Progress(request, kept, None))
            elif finish is not None or not request.num_pending:  # no more to sample: it asked for no (more) tokens
                progress.append(self._end(request, kept, finish or "length"))
        if self.policy.closed_batches and all(request.finish is not None for request in self.running):
            for request in list(self.running):
                self._leave(request)
                progress.append(Progress(request, (), request.finish))
        return progress

    def abandon(self, batch: Batch) -> None:
        """Take back a plan that failed in execution; its requests are as they were before `select`, since keys and
        values are written again at the same places."""
        for row in batch.rows:
            row.request.in_flight = False

    def only(self, row: BatchRow) -> Batch:
        """A plan of one row of an abandoned plan, to find out which request the fault belongs to."""
        row.request.in_flight = True
        return Batch((row,))

    # --- selection ------------------------------------------------------------------------------------------------

    def _select_decodes(self, rows: list[BatchRow]) -> tuple[list[Request], int]:
        """Append a row for everyone who decodes; returns those who still read their prompts, and how many tokens are
        guessed. What is asked for every row of every iteration (`Request.is_decoding`, `wants_more`, whether its blocks
        still have room) is written out here: calls would be half of the scheduler's time."""
        reading: list[Request] = []
        num_guesses = 0
        spare = self.max_batch_tokens - len(self.running)  # whoever runs has a token; guesses come from the rest
        grow = self._admission.grow
        for request in list(self.running):
            if len(rows) == self._max_rows:
                break
            num_slots = request.num_slots
            if request.in_flight or not num_slots:  # no blocks: preempted just now for an earlier one
                continue
            num_tokens = len(request.tokens)
            num_output = num_tokens - request.num_prompt
            draft: tuple[int, ...] = ()
            if request.finish is not None:
                if num_tokens > num_slots:
                    grow(request)  # what was reserved
                row = BatchRow(request, num_tokens - 1, 1, True, False, True, draft)
            elif num_tokens - request.num_computed != 1 or num_output <= 0:
                reading.append(request)
                continue
            elif num_tokens <= num_slots or grow(request):
                drafter = request.drafter
                if drafter is not None and num_tokens >= drafter.resume_at:
                    draft = self._draft(request, drafter, spare - num_guesses)
                    num_guesses += len(draft)
                row = BatchRow(
                    request, num_tokens - 1, 1 + len(draft), True, num_output < request.max_tokens, False, draft
                )
            else:
                continue
            request.in_flight = True
            rows.append(row)
        return reading, num_guesses

    def _draft(self, request: Request, drafter: Drafter, spare: int) -> tuple[int, ...]:
        """Tokens to try after the newest one of a request that decodes, as far as there is room for them."""
        limit = min(self.max_draft, spare, request.num_total - request.num_tokens - 1)
        draft = drafter.propose(request.tokens, request.num_prompt, limit, len(self.running))
        return draft[: self._admission.stretch(request, len(draft))] if draft else ()

    def _read_on(self, reading: list[Request], rows: list[BatchRow], num_decodes: int, budget: int) -> int:
        """Go on with the prompts of admitted requests; returns the tokens left for others. One that has to wait left
        no tokens or no rows, so nobody overtakes it by being admitted."""
        if num_decodes:
            budget = min(budget, self._beside(num_decodes, len(reading)))
        for request in reading[: self._max_rows - num_decodes]:
            if not request.num_slots:  # preempted just now for one that reads before it
                continue
            budget -= self._append_chunk(request, rows, budget)
        return budget

    def _beside(self, num_decodes: int, num_reading: int) -> int:
        """Prompt tokens beside streams. Rows that would decode, were their prompts read, are what a small chunk costs:
        where they are many next to the streams that it spares, it grows in proportion."""
        idle = num_reading + min(len(self.waiting), self.max_running - len(self.running))
        idle = min(idle, self._max_rows - num_decodes)
        return self.max_chunk_tokens * max(num_decodes, IDLE_ROW_WEIGHT * idle) // num_decodes

    def _admit(self, rows: list[BatchRow], num_decodes: int, budget: int) -> None:
        newcomers = self._admission.newcomers()
        while num_decodes + len(rows) < self._max_rows and (budget > 0 or self.policy.whole_prompts):
            request = next(newcomers, None)
            if request is None:
                return
            budget -= self._append_chunk(request, rows, budget)

    def _append_chunk(self, request: Request, rows: list[BatchRow], budget: int) -> int:
        """Append as many of the pending tokens as the budget allows; returns their number."""
        pending = request.num_pending
        chunk = pending if self.policy.whole_prompts else min(pending, budget)
        if chunk > 0 and request.num_computed + chunk > request.num_slots:  # with windows, blocks come chunk by chunk
            chunk = self._admission.extend(request, chunk)
        if chunk <= 0:
            return 0
        request.in_flight = True
        samples = chunk == pending and request.wants_more
        rows.append(BatchRow(request, request.num_computed, chunk, is_decode=False, samples=samples))
        return chunk

    # --- results --------------------------------------------------------------------------------------------------

    def _count_draft(self, request: Request, draft: tuple[int, ...], kept: tuple[int, ...]) -> int:
        """Keep account of a draft; returns how many of its tokens are the request's now."""
        num_accepted = max(0, len(kept) - 1)
        if request.drafter is not None:
            request.drafter.learn(len(draft), num_accepted)
        self.speculation.drafted += len(draft)
        self.speculation.accepted += num_accepted
        return num_accepted

    def _end(self, request: Request, tokens: tuple[int, ...], finish: str) -> Progress:
        """The one exit of every request, whatever ends it."""
        request.finish = finish
        if self.policy.closed_batches and finish in ("stop", "length"):
            return Progress(request, tokens, None)  # its end is told when the whole batch is done
        self._leave(request)
        return Progress(request, tokens, finish)

    def _leave(self, request: Request) -> None:
        self._admission.leave(request)
        del self._by_id[request.id]
