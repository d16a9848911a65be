"""A simulated engine around the real scheduler, which checks every plan and every result.

Its model's next token depends on all tokens before it, and its KV memory remembers, slot by slot, which prefix was
written there. Whatever the scheduler mixes up shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from noria.engine.scheduling.batch import Batch, BatchRow, Progress
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.preemption import MAX_PREEMPTIONS
from noria.engine.scheduling.request import HOLE, Request
from noria.engine.scheduling.scheduler import IDLE_ROW_WEIGHT, Scheduler

VOCABULARY = 5
STOP = frozenset({4})


def next_token(tokens: Sequence[int]) -> int:
    """The simulated model: a token decided by the whole prefix; half of the time the one that followed its last token
    before, so that guesses are right now and then."""
    noise = hash((*tokens, 17)) % 1009
    if noise % 2 and tokens[-1] in tokens[:-1]:
        return tokens[len(tokens) - 1 - tokens[-2::-1].index(tokens[-1])]
    return noise % VOCABULARY


def expected_output(request: Request) -> list[int]:
    """What the simulated model says when the request runs alone."""
    tokens = request.tokens[: request.num_prompt]
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(next_token(tokens + output))
        if output[-1] in request.stop_ids and len(output) > request.min_tokens:
            break
    return output


@dataclass(frozen=True)
class Shape:
    """The scheduler's settings, tiny so that everything is scarce."""

    policy: str
    prefix_cache: bool
    num_stages: int
    num_blocks: int
    block_size: int
    max_batch_size: int
    max_batch_tokens: int
    max_draft: int = 0
    max_chunk_tokens: int = 0
    windows: tuple[int, ...] = (0,)

    def build(self) -> Scheduler:
        policy = POLICIES[self.policy]
        max_step = policy.max_step(self.max_batch_tokens, self.max_draft)
        return Scheduler(
            policy,
            KVBlocks(self.num_blocks, self.block_size, self.prefix_cache, self.windows, max_step),
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_model_len=1000,
            num_stages=self.num_stages,
            max_draft=self.max_draft,
        )


@dataclass
class Life:
    """What the outside has seen of one request."""

    request: Request
    output: list[int] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    next_start: int = -1
    num_preemptions: int = 0
    num_iterations: int = 0  # completed
    cancelled: bool = False

    @property
    def num_begun(self) -> int:
        return self.num_iterations + self.request.in_flight


Plan = list[tuple[str, int, int, bool, bool, bool, tuple[int, ...], tuple[int, ...]]]


@dataclass
class InFlight:
    batch: Batch
    block_tables: list[list[int]]
    lengths: list[int]


class SimulatedEngine:
    """Drives a scheduler as the engine's loop does, and checks every plan and every result."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.scheduler = shape.build()
        self.lives: dict[str, Life] = {}
        self.in_flight: list[InFlight] = []
        self.memory: dict[int, int] = {}  # slot -> hash of the writer's salt and of the prefix that it ends
        self.plans: list[Plan] = []

    @property
    def capacity(self) -> int:
        """Tokens of the longest request."""
        whole = self.scheduler.policy.whole_prompts
        return self.scheduler.kv.groups.longest(self.shape.num_blocks, 56, whole_prompts=whole)

    def add(self, request: Request) -> None:
        life = Life(request, output=request.tokens[request.num_prompt :])
        self.scheduler.add(request)
        self.lives[request.id] = life

    def cancel(self, request_id: str, reason: str = "cancelled") -> None:
        progress = self.scheduler.cancel(request_id, reason)
        if self.lives[request_id].request.finish is None or progress is not None:
            self.lives[request_id].cancelled = True
        if progress is not None:
            self.note(progress)

    def note(self, progress: Progress) -> None:
        life = self.lives[progress.request.id]
        assert not life.finishes, "something was said after the end"
        life.output.extend(progress.new_tokens)
        if progress.finish is not None:
            life.finishes.append(progress.finish)
            assert self.scheduler.get(progress.request.id) is None
            assert not progress.request.blocks

    # --- one iteration ---

    def select(self) -> bool:
        alive = list(self.scheduler.running) + list(self.scheduler.waiting)
        idle = not self.in_flight
        batch = self.scheduler.select()
        if batch is None:
            self.plans.append([])
            assert not (alive and idle), "requests are here, none is in flight, and nothing steps"
            return False
        self.scheduler.check()
        self.check_plan(batch)
        self.in_flight.append(
            InFlight(
                batch, [list(row.request.blocks) for row in batch.rows], [row.request.num_tokens for row in batch.rows]
            )
        )
        if not self.scheduler.policy.preempts:
            assert not self.scheduler.preemptions.total, "what is reserved is kept"
        if self.scheduler.policy.name == "orca":
            self.check_first_come_first_served()
        return True

    def check_plan(self, batch: Batch) -> None:
        shape, policy = self.shape, self.scheduler.policy
        flying = [row.request for flight in self.in_flight for row in flight.batch.rows]
        requests = [row.request for row in batch.rows]
        assert len({id(r) for r in flying + requests}) == len(flying) + len(requests), "a request is twice in flight"
        assert 0 < len(batch.rows) <= shape.max_batch_size
        assert policy.whole_prompts or batch.num_tokens <= shape.max_batch_tokens
        read = sum(row.num_tokens for row in batch.rows if not row.is_decode)
        if shape.max_chunk_tokens and batch.num_decode_rows and not policy.whole_prompts:
            idle = min(len(self.scheduler), shape.max_batch_size) - batch.num_decode_rows  # at most
            stretch = max(1.0, IDLE_ROW_WEIGHT * idle / batch.num_decode_rows)
            assert read <= shape.max_chunk_tokens * stretch, "running streams wait for too much of others' prompts"
        assert len(self.scheduler.running) <= shape.max_batch_size * shape.num_stages
        decodes = [row.is_decode for row in batch.rows]
        assert decodes == sorted(decodes, reverse=True)
        assert batch.num_decode_rows == sum(decodes)
        if all(row.is_padding for row in batch.rows):
            assert policy.closed_batches
        for row in batch.rows:
            self.check_row(row)
        self.plans.append(
            [
                (
                    row.request.id,
                    row.start,
                    row.num_tokens,
                    row.is_decode,
                    row.samples,
                    row.is_padding,
                    row.draft,
                    tuple(row.request.blocks),
                )
                for row in batch.rows
            ]
        )

    def check_row(self, row: BatchRow) -> None:
        request, life = row.request, self.lives[row.request.id]
        end = row.start + row.num_tokens - len(row.draft)
        assert row.start < end <= request.num_tokens
        groups = self.scheduler.kv.groups
        assert len(request.blocks) // groups.num * self.shape.block_size >= end + len(row.draft)
        for group, limit in enumerate(groups.limits):
            held = request.blocks[group :: groups.num]
            assert not limit or row.num_tokens > groups.max_step or len(held) - held.count(HOLE) <= limit
        assert len(row.draft) <= self.shape.max_draft
        assert not row.draft or (row.is_decode and row.samples)
        assert request.num_tokens + len(row.draft) < request.num_total or not row.draft, "a guess beyond the end"
        if row.is_padding:
            assert self.scheduler.policy.closed_batches and request.finish is not None
            return
        assert request.finish is None and request.in_flight
        assert row.samples == (end == request.num_tokens and request.num_output < request.max_tokens)
        assert not row.is_decode or end == row.start + 1
        if self.scheduler.policy.whole_prompts:
            assert end == request.num_tokens
        if life.next_start < 0 or life.num_preemptions != request.num_preemptions:
            assert row.start % self.shape.block_size == 0, "only whole blocks are reused"
            assert row.start == 0 or (self.shape.prefix_cache and request.reuse_prefix)
            life.num_preemptions = request.num_preemptions
            assert request.num_preemptions <= MAX_PREEMPTIONS
        else:
            assert row.start == life.next_start, "a position is skipped or computed twice"
        life.next_start = -2 if row.draft else end  # known once it is clear how many guesses were right

    def check_first_come_first_served(self) -> None:
        alive = sorted((life for life in self.lives.values() if not life.finishes), key=lambda life: life.request.order)
        for earlier, later in pairwise(alive):
            if earlier.request.class_rank == later.request.class_rank:
                assert earlier.num_begun >= later.num_begun

    def collect(self) -> None:
        """Execute and complete the oldest plan."""
        flight = self.in_flight.pop(0)
        sampled = [
            self.execute(row, table, length)
            for row, table, length in zip(flight.batch.rows, flight.block_tables, flight.lengths, strict=True)
        ]
        self.complete(flight.batch, sampled)
        self.scheduler.check()

    def complete(self, batch: Batch, sampled: list[list[int]]) -> None:
        for progress in self.scheduler.complete(batch, sampled):
            self.note(progress)
        for row, tokens in zip(batch.rows, sampled, strict=True):
            self.lives[row.request.id].num_iterations += 1
            if row.draft:
                self.lives[row.request.id].next_start = row.start + len(tokens)

    def execute(self, row: BatchRow, table: list[int], length: int) -> list[int]:
        request, size = row.request, self.shape.block_size
        assert request.num_tokens == length, "tokens changed under a plan"
        tokens = [*request.tokens, *row.draft]
        prefix = hash(request.salt)
        windows = self.shape.windows
        for position in range(row.start + row.num_tokens):
            prefix = hash((prefix, tokens[position]))
            for group, window in enumerate(windows):
                block = table[position // size * len(windows) + group]
                slot = block * size + position % size
                if position >= row.start:
                    assert block != HOLE
                    self.memory[slot] = prefix
                elif not row.is_padding and (not window or position > row.start - window):
                    assert block != HOLE and self.scheduler.kv.num_holding(block), "a row reads what was given back"
                    assert self.memory[slot] == prefix, "a row reads what is not its own"
        chosen: list[int] = []
        while row.samples and len(chosen) <= len(row.draft):
            known = len(request.tokens) + len(chosen)
            chosen.append(next_token(tokens[:known]))
            if chosen != list(row.draft[: len(chosen)]):
                break
        return chosen

    def fail(self, guilty: int) -> None:
        """The oldest plan raises; its rows are tried one by one, and the guilty one ends with an error."""
        flight = self.in_flight.pop(0)
        self.scheduler.abandon(flight.batch)
        self.scheduler.check()
        for index, (row, table, length) in enumerate(
            zip(flight.batch.rows, flight.block_tables, flight.lengths, strict=True)
        ):
            alone = self.scheduler.only(row)
            if index == guilty and not row.is_padding:
                self.scheduler.abandon(alone)
                self.cancel(row.request.id, "error")
                continue
            self.complete(alone, [self.execute(row, table, length)])

    def drop(self) -> None:
        """The oldest plan is lost and its requests are planned again."""
        self.scheduler.abandon(self.in_flight.pop(0).batch)
        for life in self.lives.values():
            if not life.request.in_flight and not life.finishes:
                life.next_start = life.request.num_computed if life.request.blocks else -1

    # --- the end ---

    def drain(self) -> None:
        for _ in range(20_000):
            if not len(self.scheduler):
                break
            while len(self.in_flight) < self.shape.num_stages and self.select():
                pass
            self.collect()
        while self.in_flight:  # padding of requests that have left
            self.collect()
        assert not len(self.scheduler), "requests never end"
        self.check_end()

    def check_end(self) -> None:
        self.scheduler.check()
        assert self.scheduler.kv.num_free == self.scheduler.kv.num_blocks
        assert not self.scheduler.running and not self.scheduler.waiting
        for life in self.lives.values():
            assert len(life.finishes) == 1
            assert not life.request.in_flight
            expected = expected_output(life.request)
            if life.finishes[0] in ("stop", "length"):
                assert life.output == expected
                stopped = bool(expected) and expected[-1] in STOP and len(expected) > life.request.min_tokens
                assert life.finishes[0] == ("stop" if stopped else "length")
            else:
                assert life.cancelled
                assert life.output == expected[: len(life.output)]
