"""Random traces against every invariant of the scheduler, under every policy.

A simulated engine stands in for execution: its model's next token depends on all tokens before it, and its KV memory
remembers, slot by slot, which prefix was written there. Whatever the scheduler mixes up shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from noria.engine.scheduling.batch import Batch, BatchRow, Progress
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.preemption import MAX_PREEMPTIONS
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler

VOCABULARY = 5
STOP = frozenset({4})


def next_token(tokens: Sequence[int]) -> int:
    """The simulated model: any token, decided by the whole prefix."""
    return hash((*tokens, 17)) % 1009 % VOCABULARY


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
    max_chunk_tokens: int

    def build(self) -> Scheduler:
        return Scheduler(
            POLICIES[self.policy],
            KVBlocks(self.num_blocks, self.block_size, self.prefix_cache),
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_model_len=1000,
            num_stages=self.num_stages,
        )


def shapes(policy: str) -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        policy=st.just(policy),
        prefix_cache=st.booleans(),
        num_stages=st.integers(1, 2),
        num_blocks=st.integers(4, 14),
        block_size=st.sampled_from([2, 3, 4, 1]),
        max_batch_size=st.sampled_from([2, 1, 3, 5]),
        max_batch_tokens=st.sampled_from([6, 1, 3, 12]),
        max_chunk_tokens=st.sampled_from([0, 2, 4]),
    )


@dataclass
class Life:
    """What the outside has seen of one request."""

    request: Request
    output: list[int] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    next_start: int = -1
    num_preemptions: int = 0
    cancelled: bool = False


Plan = list[tuple[str, int, int, bool, bool, bool, tuple[int, ...]]]


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
        self.memory: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # slot -> (writer's salt, the prefix that it ends)
        self.plans: list[Plan] = []

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
        beside = shape.max_chunk_tokens if batch.num_decode_rows else 0
        assert policy.whole_prompts or not beside or read <= beside
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
                    tuple(row.request.blocks),
                )
                for row in batch.rows
            ]
        )

    def check_row(self, row: BatchRow) -> None:
        request, life = row.request, self.lives[row.request.id]
        end = row.start + row.num_tokens
        assert row.num_tokens >= 1 and end <= request.num_tokens
        assert len(request.blocks) * self.shape.block_size >= end
        if row.is_padding:
            assert self.scheduler.policy.closed_batches and request.finish is not None
            return
        assert request.finish is None and request.in_flight
        assert row.samples == (end == request.num_tokens and request.num_output < request.max_tokens)
        assert not row.is_decode or row.num_tokens == 1
        if self.scheduler.policy.whole_prompts:
            assert end == request.num_tokens
        if life.next_start < 0 or life.num_preemptions != request.num_preemptions:
            assert row.start % self.shape.block_size == 0, "only whole blocks are reused"
            assert row.start == 0 or (self.shape.prefix_cache and request.reuse_prefix)
            life.num_preemptions = request.num_preemptions
            assert request.num_preemptions <= MAX_PREEMPTIONS
        else:
            assert row.start == life.next_start, "a position is skipped or computed twice"
        life.next_start = end

    def check_first_come_first_served(self) -> None:
        alive = sorted((life.request for life in self.lives.values() if not life.finishes), key=lambda r: r.order)
        for earlier, later in pairwise(alive):
            if earlier.class_rank == later.class_rank:
                assert earlier.num_iterations >= later.num_iterations

    def collect(self) -> None:
        """Execute and complete the oldest plan."""
        flight = self.in_flight.pop(0)
        sampled = [
            self.execute(row, table, length)
            for row, table, length in zip(flight.batch.rows, flight.block_tables, flight.lengths, strict=True)
        ]
        for progress in self.scheduler.complete(flight.batch, sampled):
            self.note(progress)
        self.scheduler.check()

    def execute(self, row: BatchRow, table: list[int], length: int) -> list[int]:
        request, size = row.request, self.shape.block_size
        assert request.num_tokens == length, "tokens changed under a plan"
        for position in range(row.start + row.num_tokens):
            slot = table[position // size] * size + position % size
            prefix = tuple(request.tokens[: position + 1])
            if position >= row.start:
                self.memory[slot] = (request.salt, prefix)
            elif not row.is_padding:
                assert self.memory[slot] == (request.salt, prefix), "a row reads what is not its own"
        return [next_token(request.tokens)] if row.samples else []

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
            for progress in self.scheduler.complete(alone, [self.execute(row, table, length)]):
                self.note(progress)

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


@dataclass(frozen=True)
class Arrival:
    """A request to come; resumed ones arrive with `num_delivered` output tokens that the model has said before."""

    prompt: tuple[int, ...]
    max_tokens: int
    class_rank: int
    salt: bytes
    min_tokens: int
    reuse_prefix: bool
    num_delivered: int

    def request(self, name: str, capacity: int) -> Request:
        prompt = list(self.prompt[:capacity])
        request = Request(
            name,
            prompt,
            len(prompt),
            min(self.max_tokens, capacity - len(prompt)),
            class_rank=self.class_rank,
            stop_ids=STOP,
            min_tokens=self.min_tokens,
            salt=self.salt,
            reuse_prefix=self.reuse_prefix,
        )
        delivered = expected_output(request)
        if delivered and delivered[-1] in STOP and len(delivered) > self.min_tokens:
            delivered.pop()  # its end would have been delivered too
        request.tokens = prompt + delivered[: self.num_delivered]
        return request


# Few distinct prompts with long common starts, so that prefixes are shared all the time.
prompts = st.builds(
    lambda start, end: tuple((0, 1, 2, 3) * 8)[:start] + tuple(end),
    st.integers(0, 14),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
)
arrivals = st.builds(
    Arrival,
    prompt=prompts,
    max_tokens=st.integers(0, 16),
    class_rank=st.sampled_from([0, 1, 1, 1, 3]),
    salt=st.sampled_from([b"", b"", b"a", b"x" * 70 + b"1", b"x" * 70 + b"2"]),
    min_tokens=st.integers(0, 3),
    reuse_prefix=st.sampled_from([True, True, True, False]),
    num_delivered=st.sampled_from([0, 0, 0, 1, 5, 20]),
)


class Trace(RuleBasedStateMachine):
    """Any order of arrivals, cancels, plans, results and failures; `policy` is set by each subclass."""

    policy: str

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.engine = SimulatedEngine(data.draw(shapes(self.policy)))
        self.capacity = self.engine.shape.num_blocks * self.engine.shape.block_size

    def new_request(self, arrival: Arrival) -> Request:
        return arrival.request(f"r{len(self.engine.lives)}", self.capacity)

    def alive(self) -> list[str]:
        return [name for name, life in self.engine.lives.items() if not life.finishes]

    @rule(coming=st.lists(arrivals, min_size=1, max_size=4))
    def add(self, coming: list[Arrival]) -> None:
        for arrival in coming:
            self.engine.add(self.new_request(arrival))

    @precondition(lambda self: not self.engine.in_flight and not self.engine.scheduler.waiting)
    @rule(candidates=st.lists(arrivals, min_size=1, max_size=6))
    def claim(self, candidates: list[Arrival]) -> None:
        """Whatever is claimed within `room` starts in the next plan."""
        scheduler = self.engine.scheduler
        rooms = scheduler.rooms(4)
        used, claimed = 0, []
        assert rooms[3] == scheduler.room()
        for arrival in candidates:
            request = self.new_request(arrival)
            request.tokens = request.tokens[: request.num_prompt]
            output = request.max_tokens if scheduler.policy.reserve_output else min(1, request.max_tokens)
            cost = scheduler.kv.blocks_for(request.num_prompt + output)
            room = rooms[3]
            if len(claimed) < room.requests and cost <= room.blocks - used:
                used += cost
                claimed.append(request)
                self.engine.add(request)
        if len(self.alive()) == len(claimed) and not scheduler.running:
            assert rooms[3].blocks == scheduler.kv.num_blocks, "an idle engine offers its whole pool"
        if self.engine.select():
            batch = self.engine.in_flight[-1].batch
            full = scheduler.max_running > len(batch.rows) == scheduler.max_batch_size  # the rest: the next plan's
            read = batch.num_tokens - batch.num_decode_rows
            spent = batch.num_tokens == scheduler.max_batch_tokens or read == scheduler.max_chunk_tokens
            cut = not scheduler.policy.whole_prompts and spent
            started = [request in scheduler.running or self.shares(request) for request in claimed]
            assert full or cut or all(started)

    def shares(self, request: Request) -> bool:
        """Whether it waits for blocks that one before it is computing."""
        kv = self.engine.scheduler.kv
        reader = kv.reader_after(request, kv.cached_prefix(request))
        return reader is not None and reader in self.engine.scheduler.running and reader.order < request.order

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.alive())))

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.shape.num_stages)
    @rule()
    def select(self) -> None:
        self.engine.select()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def collect(self) -> None:
        self.engine.collect()

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        """The engine's plain loop for a while."""
        for _ in range(count):
            while len(self.engine.in_flight) < self.engine.shape.num_stages and self.engine.select():
                pass
            if self.engine.in_flight:
                self.engine.collect()

    @precondition(lambda self: self.engine.in_flight)
    @rule(guilty=st.integers(0, 5))
    def fail(self, guilty: int) -> None:
        self.engine.fail(guilty)

    @precondition(lambda self: len(self.engine.in_flight) == 1)
    @rule()
    def drop(self) -> None:
        self.engine.drop()

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            scheduler = self.engine.scheduler
            scheduler.check()
            assert scheduler.kv.num_free + scheduler.kv.num_held == scheduler.kv.num_blocks
            assert 0 <= scheduler.kv.num_cached <= scheduler.kv.num_free

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


class StaticTrace(Trace):
    policy = "static"


class OrcaTrace(Trace):
    policy = "orca"


class PagedTrace(Trace):
    policy = "paged"


TestStatic = StaticTrace.TestCase
TestOrca = OrcaTrace.TestCase
TestPaged = PagedTrace.TestCase


@pytest.mark.parametrize("policy", list(POLICIES))
@given(data=st.data())
def test_the_same_calls_give_the_same_plans(policy: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(policy))
    coming = data.draw(st.lists(arrivals, min_size=1, max_size=8))
    runs = []
    for _ in range(2):
        engine = SimulatedEngine(shape)
        for index, arrival in enumerate(coming):
            engine.add(arrival.request(f"r{index}", shape.num_blocks * shape.block_size))
            while len(engine.in_flight) < shape.num_stages and engine.select():
                pass
            engine.collect()
        engine.drain()
        runs.append(engine.plans)
    assert runs[0] == runs[1]


@given(data=st.data())
def test_policies_and_pools_agree_on_every_output(data: st.DataObject) -> None:
    """One set of requests under all policies, and under `paged` with ever smaller pools: `drain` compares each output
    with what the request says alone."""
    coming = data.draw(st.lists(arrivals, min_size=1, max_size=6))
    capacity = 44
    for policy, num_blocks in (("static", 40), ("orca", 40), ("paged", 40), ("paged", 16), ("paged", 11)):
        engine = SimulatedEngine(Shape(policy, True, 1, num_blocks, 4, 4, 8, 3))
        for index, arrival in enumerate(coming):
            engine.add(arrival.request(f"r{index}", capacity))
        engine.drain()
