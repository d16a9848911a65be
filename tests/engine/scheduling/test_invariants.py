"""Random traces against every invariant of the scheduler, under every policy."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from noria.engine.scheduling.request import Request
from tests.engine.scheduling.arrivals import Arrival, arrivals, shapes
from tests.engine.scheduling.simulated_engine import SimulatedEngine


class Trace(RuleBasedStateMachine):
    """Any order of arrivals, cancels, plans, results and failures; `policy` is set by each subclass."""

    policy: str

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.engine = SimulatedEngine(data.draw(shapes(self.policy)))
        self.capacity = self.engine.capacity

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
            at_once = request.num_prompt if scheduler.policy.whole_prompts else 0
            cost = scheduler.kv.groups.most(request.num_prompt + output, at_once=at_once)
            room = rooms[3]
            if len(claimed) < room.requests and cost <= room.blocks - used:
                used += cost
                claimed.append(request)
                self.engine.add(request)
        if len(self.alive()) == len(claimed) and not scheduler.running:
            assert rooms[3].blocks == scheduler.kv.num_blocks, "an idle engine offers its whole pool"
        if self.engine.select():
            batch = self.engine.in_flight[-1].batch
            here = min(len(scheduler.running) + len(scheduler.waiting), scheduler.max_running)
            shared = here if scheduler.policy.whole_prompts else -(-here // self.engine.shape.num_stages)
            full = (
                scheduler.max_running > len(batch.rows) == min(scheduler.max_batch_size, shared)
            )  # the rest: the next's
            read = sum(row.num_tokens for row in batch.rows if not row.is_decode)
            spent = batch.num_tokens == scheduler.max_batch_tokens or read >= scheduler.max_chunk_tokens
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
            unheld = scheduler.kv.num_free + scheduler.kv.num_promised
            assert unheld + scheduler.kv.num_held == scheduler.kv.num_blocks
            assert 0 <= scheduler.kv.num_cached <= unheld

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
