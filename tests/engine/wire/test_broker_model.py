"""Random interleavings of every script, held against a plain reference that predicts each reply and the whole store.

Two gateways and three engines share one pool while engines die, are paused, drain and lose replies, gateways die, and
the clock jumps past leases, deadlines and patience. On Redis, on the embedded store, and on a cluster of three nodes,
where a script that touched a key outside its slot would be refused. `HYPOTHESIS_PROFILE=nightly` looks ten times as
hard; `--hypothesis-seed` repeats a run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import cycle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from noria.engine.wire import engine_broker, gateway_broker, keys, recorder
from noria.engine.wire.backpressure import QueueFull, QueueLimits
from noria.engine.wire.broker import GatewayBroker
from noria.engine.wire.connection import CLAIM, PROGRESS, SNAPSHOT
from noria.engine.wire.messages import (
    CLASSES,
    FinishReason,
    GenerationRequest,
    ModelCard,
    SamplingParams,
    TokenFrame,
    TokenizerFiles,
    decode_frames,
)
from noria.engine.wire.publish import to_row
from tests.engine.wire.reference.actors import LEASE, AsyncStore, Client, Engine
from tests.engine.wire.reference.contents import differences, expected, read
from tests.engine.wire.reference.mirror import Mirror
from tests.engine.wire.reference.pool import Pool
from tests.engine.wire.reference.stores import ClockedStore, Cluster, clocked_store

MODEL = "demo/{model}"
POOL = keys.pool(MODEL)
TENANTS = ("a", "b/ü", "c")
LIMITS = QueueLimits(depth=20, size=3_500, tenant_depth=8, tenant_size=1_400)
BEGIN = 10**12  # ms

room = st.tuples(
    st.sampled_from((0, 1, 2, 3, 5, (4, 3, 2, 1), (2, 2, 1, 0))),  # slots
    st.sampled_from((3, 3, 9, 9, 20, (12, 9, 6, 3))),  # KV blocks
)
iteration = st.tuples(
    room,
    st.lists(
        st.sampled_from((0, 1, 1, 2, -1)), min_size=1, max_size=4
    ),  # tokens for what it holds, by turns; -1: the end
    st.sampled_from((None, None, None, 0, 1, 1, 2, 9)),  # commands after which the connection breaks
    st.booleans(),  # and then the exchange is tried again at once
)
some_engines = st.sets(st.integers(0, 2))


class BrokerMachine(RuleBasedStateMachine):
    def __init__(self, store: ClockedStore, card: ModelCard, tokenizer_files: TokenizerFiles) -> None:
        super().__init__()
        self.store, self.files = store, tokenizer_files
        self.card = type(card)(**{f: getattr(card, f) for f in card.__struct_fields__} | {"id": MODEL, "block_size": 4})
        store.flush()
        self.pool = Pool(BEGIN)
        store.set_clock(BEGIN)
        self.mirror = Mirror(store, self.pool, POOL)
        self.runner = asyncio.Runner()
        self.next_id = 0
        self.requests: dict[str, GenerationRequest] = {}  # let in
        self.clients: dict[str, Client] = {}
        self.log_clients: dict[str, Client] = {}
        self.last_read: dict[str, bytes] = {}
        self.dead_gateways: set[str] = set()
        self.num_late: Counter[str] = Counter()  # late words of an engine since its last exchange
        self.gateways = [self.new_gateway() for _ in range(2)]
        self.engines = [self.new_engine() for _ in range(3)]

    def new_gateway(self) -> GatewayBroker:
        self.next_id += 1
        gateway = GatewayBroker("unix:///nowhere", stream_ttl=600, boot_id=f"gateway{self.next_id}", limits=LIMITS)
        gateway._store = AsyncStore(self.mirror)  # type: ignore[assignment]
        self.runner.run(gateway.start())
        return gateway

    def new_engine(self, engine_id: str | None = None) -> Engine:
        self.next_id += 1  # no random names: a failure must come again when it is replayed
        engine = Engine(self.mirror, MODEL, engine_id or f"engine{self.next_id}")
        engine.broker.register(self.card, self.files)
        return engine

    def gateway_of(self, frame: TokenFrame) -> tuple[str, TokenFrame]:
        return self.requests[frame.request_id].gateway, frame

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(
        gateway=st.integers(0, 1),
        service_class=st.sampled_from(CLASSES),
        kinds=st.lists(
            st.tuples(
                st.sampled_from(TENANTS),
                st.sampled_from((1, 2, 10, 30, 30)),  # prompt tokens
                st.sampled_from((1, 4, 12, 30, 30)),  # max_tokens
                st.integers(-1, 1),  # priority
                st.sampled_from((1.0, 0.5, 1.0, 4.0)),  # weight
                st.booleans(),  # logged
                st.sampled_from(("", "acme")),  # account
                st.booleans(),  # a copy
                st.sampled_from((None, None, 1_000, 8_000)),  # deadline, ms
            ),
            min_size=1,
            max_size=7,
        ),
        reserve=st.booleans(),
    )
    def enqueue(self, gateway, service_class, kinds, reserve):
        card = type(self.card)(
            **{f: getattr(self.card, f) for f in self.card.__struct_fields__} | {"reserve_output": reserve}
        )
        for tenant, prompt, max_tokens, priority, weight, logged, account, copy, deadline in kinds:
            self.next_id += 1
            request = GenerationRequest(
                id=f"r{self.next_id}",
                model=MODEL,
                prompt=[1] * prompt,
                sampling=SamplingParams(max_tokens=max_tokens),
                gateway=self.gateways[gateway].boot_id,
                tenant=tenant,
                service_class=service_class,
                priority=priority,
                weight=weight,
                logged=logged,
                account=account,
                copy=copy,
                deadline_ms=deadline and self.pool.now + deadline,
            )
            try:
                self.runner.run(self.gateways[gateway].enqueue(request, card))
            except QueueFull:
                continue
            self.requests[request.id] = request

    @rule(which=st.integers(0, 2), iterations=st.lists(iteration, min_size=1, max_size=8))
    def iterate(self, which, iterations):
        """An engine's turns."""
        engine = self.engines[which]
        self.num_late[engine.id] = 0
        for room, counts, cut, tries_again in iterations:
            frames = []
            for request_id, count in zip(list(engine.held), cycle(counts), strict=False):
                if count:
                    finish = FinishReason.STOP if count < 0 else None
                    frames.append(self.gateway_of(engine.frame(request_id, abs(count), finish)))
            engine.exchange(frames, *room, cut=cut)
            if cut is not None and tries_again:
                engine.exchange([], *room)

    @rule(
        data=st.data(),
        gateway=st.integers(0, 1),
        what=st.sampled_from(("cancel", "cancel", "repeat", "look", "gateway dies")),
        left=st.sampled_from(((), (2, "stop"))),  # what the client has had, and why it ends
    )
    def gateway_acts(self, data, gateway, what, left):
        broker = self.gateways[gateway]
        if what == "gateway dies":
            self.read()
            self.store.run(("DEL", keys.frames(broker.boot_id)))
            self.dead_gateways.add(broker.boot_id)
            self.gateways[gateway] = self.new_gateway()
        elif self.requests:
            everything = list(self.requests)
            alive = list(self.pool.requests) or everything
            request_id = data.draw(st.sampled_from(alive) | st.sampled_from(everything))
            if what == "cancel":
                self.runner.run(broker.cancel(MODEL, request_id, *left))
            elif what == "repeat" and request_id in self.pool.requests:
                self.runner.run(broker.enqueue(self.requests[request_id], self.card))
            elif what == "look":
                self.runner.run(broker.position(MODEL, request_id))
                self.mirror.run(SNAPSHOT(POOL))

    @rule(data=st.data(), which=st.integers(0, 2), epoch=st.sampled_from((-1, 0)))
    def late_words_arrive(self, data, which, epoch):
        """Commands that an engine sent in another time: for what it does not hold (any more), or under an old epoch.
        They are no more than the connections it lost since its last exchange; a crowd would fill its journal."""
        engine = self.engines[which].id
        self.num_late[engine] += 1
        if self.num_late[engine] >= recorder.FOLD_EVERY:
            return
        others = [r for r in self.pool.requests.values() if r.engine != engine]
        targets = self.pool.held(engine) if epoch < 0 else others
        if not targets or (engine in self.pool.leases and self.pool.leases[engine].to_cancel):
            return
        r = data.draw(st.sampled_from(targets))
        row = to_row(TokenFrame(r.id, r.epoch + epoch, r.seq, [r.seq]))
        self.mirror.run(
            PROGRESS(POOL, engine, row.length + row.encoded, recorder.FOLD_EVERY),
            CLAIM(POOL, engine, int(LEASE * 1000), "0", "0", b"", 0, 1, 1, 1, 1, 1, r.id, r.epoch + epoch, r.seq, ""),
        )

    @rule(ms=st.sampled_from((250, 500, 1_000, 2_000)), renewing=some_engines, gateway=st.integers(0, 1))
    def time_passes(self, ms, renewing, gateway):
        self.pass_time(ms, renewing)
        self.runner.run(self.gateways[gateway].reap(MODEL))

    def pass_time(self, ms: int, renewing: set[int]) -> None:
        self.pool.now += ms
        self.store.set_clock(self.pool.now)
        for which in sorted(renewing):
            self.engines[which].broker.renew()

    @rule(
        which=some_engines,
        gateway=st.integers(0, 1),
        what=st.sampled_from(("die", "pause", "pause", "return under their names", "restart in place", "drain")),
    )
    def engines_stop(self, which, gateway, what):
        if what not in ("drain", "restart in place"):
            self.pass_time(int(LEASE * 1000) + 250, {0, 1, 2} - which)
            self.runner.run(self.gateways[gateway].reap(MODEL))
        for each in sorted(which):
            if what == "drain":
                self.drain(self.engines[each])
            if what != "pause":
                self.engines[each] = self.new_engine(None if what in ("die", "drain") else self.engines[each].id)

    def drain(self, engine: Engine) -> None:
        engine.exchange([])
        engine.broker.close()

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def the_store_is_as_predicted(self):
        found = read(self.store.client, POOL)
        problems = differences(expected(self.pool), found)
        assert not problems, "\n".join(problems)

    @invariant()
    def engines_run_what_is_theirs(self):
        for engine in self.engines:
            running = {i: claimed.epoch for i, (claimed, _) in engine.held.items()}
            theirs = {r.id: r.epoch for r in self.pool.held(engine.id) if not r.done}
            assert running.items() <= theirs.items() or engine.id not in self.pool.leases

    @invariant()
    def read(self):
        """Clients take in what came; they see each position once."""
        for gateway in self.gateways:
            for frame in self.new_frames(keys.frames(gateway.boot_id)):
                self.clients.setdefault(frame.request_id, Client()).accept(frame)
        for request_id, request in self.requests.items():
            if request.logged and self.log_client(request_id).finish is None:
                for frame in self.new_frames(keys.log(request_id)):
                    self.log_client(request_id).accept(frame)

    def log_client(self, request_id: str) -> Client:
        return self.log_clients.setdefault(request_id, Client())

    def new_frames(self, key: str) -> Iterator[TokenFrame]:
        (entries,) = self.store.run(("XRANGE", key, "(" + self.last_read.get(key, b"0-0").decode(), "+"))
        for entry, fields in entries:
            self.last_read[key] = entry
            fields = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            yield from decode_frames(fields[b"f"]) if b"f" in fields else []

    # --- the end ----------------------------------------------------------------------------------------------------

    def teardown(self):
        try:
            self.nothing_lasts()
            self.run_to_the_end()
        finally:
            for gateway in self.gateways:
                self.runner.run(gateway.close())
            self.runner.close()

    def nothing_lasts(self):
        for key in self.store.client.keys(POOL + "*"):
            kept = key.decode().removeprefix(POOL) in ("clock", "dead")
            assert kept or self.store.client.pttl(key) > 0, f"{key} stays for ever"

    def run_to_the_end(self):
        for engine in self.engines:
            self.drain(engine)
        self.engines = [self.new_engine()]
        (engine,) = self.engines
        for _ in range(200):
            frames = [self.gateway_of(engine.frame(i, 10)) for i in list(engine.held)]
            engine.exchange(frames, 6)
            self.the_store_is_as_predicted()
            if not self.pool.requests and not engine.held:
                break
        self.drain(engine)
        self.runner.run(self.gateways[0].reap(MODEL))
        self.the_store_is_as_predicted()
        self.read()
        assert not self.pool.requests, "lost"
        for request_id, request in self.requests.items():
            if request.gateway not in self.dead_gateways:
                assert self.clients[request_id].finish is not None, request_id
            if request.logged:
                assert self.log_client(request_id).finish is not None, request_id
        accounted = [request_id for request_id, request in self.requests.items() if request.account]
        assert sorted(entry["id"] for entry in self.pool.ledger) == sorted(accounted), "each is charged once"
        rest = {k for k in self.store.key_names() if not k.startswith(("noria:log:", "noria:frames:"))}
        assert rest - {POOL + "dead", POOL + "ledger"} == {
            POOL + n for n in ("card", "tokenizer", "drain", "clock")
        } | {"noria:pools"}


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[ClockedStore]:
    with clocked_store(request.param, POOL) as store:
        yield store


@pytest.mark.parametrize("store", ["redis", "valkey", "cluster"], indirect=True)
def test_any_interleaving(store, card, tokenizer_files, monkeypatch):
    monkeypatch.setattr(gateway_broker, "HOUSEKEEPING_EVERY", 3600.0)
    for module, name, number in (  # so that all of it happens within a few steps
        (recorder, "FOLD_EVERY", 3),
        (engine_broker, "LOOKAHEAD", 1),
        (engine_broker, "MAX_PASSED_OVER", 3),
    ):
        monkeypatch.setattr(module, name, number)
    share = 8 if isinstance(store, Cluster) else 4  # it takes a round trip for each command
    run_state_machine_as_test(
        lambda: BrokerMachine(store, card, tokenizer_files),
        settings=settings(max_examples=settings.default.max_examples // share, stateful_step_count=50, deadline=None),
    )
