"""Random interleavings of every script, held against a plain reference: nothing lost, nothing twice, all counts true.

Two gateways and three engines share one pool while engines die, are paused, drain and lose replies, gateways die,
clocks jump past leases and deadlines. On Redis, on the embedded store, and on a cluster of three nodes, where a script
that touched a key outside its slot would be refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from noria.engine.wire import connection, gateway_broker, keys, recorder
from noria.engine.wire.broker import BrokerUnavailable, EngineBroker, GatewayBroker
from noria.engine.wire.engine_broker import MAX_DEATHS
from noria.engine.wire.messages import (
    CLASSES,
    Claimed,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenFrame,
    Usage,
    decode_frames,
    encode,
)

MODEL = "demo/{model}"
POOL = keys.pool(MODEL)
BLOCKS = 10**6
TENANTS = ("a", "b/ü")


@dataclass
class Known:
    """One request as the reference sees it."""

    request: GenerationRequest
    arrival: int
    state: str = "queued"  # queued, suspect, running, ended
    engine: str = ""
    epoch: int = 0
    recorded: int = 0
    done: bool = False
    deaths: int = 0
    lives: set[str] = field(default_factory=set)
    cancelled: bool = False
    overdue: bool = False

    @property
    def waits(self) -> bool:
        return self.state in ("queued", "suspect")

    @property
    def tokens(self) -> int:
        return len(self.request.prompt) + self.request.sampling.max_tokens


class Reference:
    """What the scripts should do, in plain Python; the choice among waiting requests is checked, not predicted."""

    def __init__(self) -> None:
        self.requests: dict[str, Known] = {}
        self.trials: dict[str, str] = {}
        self.arrivals = 0
        self.buried: list[str] = []

    def held_by(self, engine: str) -> dict[str, Known]:
        return {i: r for i, r in self.requests.items() if r.state == "running" and r.engine == engine}

    def enqueue(self, request: GenerationRequest) -> None:
        if request.id not in self.requests:
            self.arrivals += 1
            self.requests[request.id] = Known(request, self.arrivals)

    def record(self, engine: str, frame: TokenFrame) -> None:
        r = self.requests[frame.request_id]
        ours = r.state == "running" and (r.engine, r.epoch) == (engine, frame.epoch)
        if ours and not r.done and r.recorded == frame.seq:
            r.recorded += len(frame.token_ids)
            r.done = frame.finish is not None
            if frame.token_ids and self.trials.get(engine) == frame.request_id:
                del self.trials[engine]

    def finish(self, engine: str, request_id: str, epoch: int) -> None:
        r = self.requests[request_id]
        if r.state == "running" and (r.engine, r.epoch) == (engine, epoch):
            r.state = "ended"
            if self.trials.get(engine) == request_id:
                del self.trials[engine]

    def expire(self) -> None:
        for r in self.requests.values():
            if r.waits and r.overdue:
                r.state = "ended"

    def cancel(self, request_id: str) -> None:
        r = self.requests[request_id]
        if r.waits:
            r.state = "ended"
        elif r.state == "running":
            r.cancelled = True

    def claim(self, engine: str, ids: set[str], max_requests: int) -> None:
        waiting = {i: r for i, r in self.requests.items() if r.waits}
        suspects = {i for i, r in waiting.items() if r.state == "suspect"}
        tried = bool(suspects) and engine not in self.trials and max_requests > 0
        assert ids <= set(waiting), "claimed what does not wait"
        assert len(ids & suspects) == tried, "one suspect at a time"
        assert len(ids) == min(max_requests, len(waiting) - len(suspects) + tried), "no claim is left out"
        for service_class in CLASSES:
            for tenant in TENANTS:
                line = [
                    (r.request.priority, r.arrival, i)
                    for i, r in waiting.items()
                    if i not in suspects and (r.request.service_class, r.request.tenant) == (service_class, tenant)
                ]
                order = [i in ids for _, _, i in sorted(line)]
                assert order == sorted(order, reverse=True), "a tenant's requests go by priority, then arrival"
        for i in ids:
            r = self.requests[i]
            if r.state == "suspect":
                self.trials[engine] = i
            r.state, r.engine, r.epoch = "running", engine, r.epoch + 1

    def release(self, engine: str, life: str, *, death: bool) -> None:
        trial = self.trials.pop(engine, None)
        for i, r in self.held_by(engine).items():
            suspect = trial == i
            if death and not r.done and trial in (None, i) and life not in r.lives:
                r.deaths += 1
                r.lives.add(life)
                suspect = True
            if r.cancelled:
                r.state = "ended"
            elif suspect and r.deaths >= MAX_DEATHS and life in r.lives and death and not r.done:
                r.state = "ended"
                self.buried.append(i)
            else:
                r.state = "suspect" if suspect else "queued"
            r.engine = ""


class Client:
    """One request's answer as a gateway takes it: older epochs and seen positions are dropped."""

    def __init__(self) -> None:
        self.epoch = 0
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None

    def accept(self, frame: TokenFrame) -> None:
        if self.finish is not None or frame.epoch < self.epoch:
            return
        self.epoch = frame.epoch
        assert frame.seq <= len(self.tokens), "a gap"
        self.tokens += frame.token_ids[len(self.tokens) - frame.seq :]
        self.finish = frame.finish


class LossyStore:
    """The engine's store; when told to, it carries out the first commands alone and then loses the connection."""

    def __init__(self, store) -> None:
        self.store = store
        self.cut: int | None = None
        self.ran: list[connection.Command] = []

    def run(self, *commands):
        self.ran = list(commands)
        if self.cut is None:
            return self.store.run(*commands)
        cut, self.cut = self.cut, None
        self.ran = list(commands[:cut])
        if cut:
            self.store.run(*commands[:cut])
        raise BrokerUnavailable("cut")

    def ran_script(self, script: connection.Script) -> bool:
        return any(command[0] == "EVALSHA" and command[1] == script.sha for command in self.ran)

    def close(self) -> None:
        self.store.close()


class Engine:
    """An engine that can emit any prefix of each answer; position p of every answer is token p."""

    def __init__(self, cluster, engine_id: str | None = None) -> None:
        self.broker = EngineBroker(cluster.url, MODEL, engine_id=engine_id, gone_after=0.0, lease_seconds=600)
        self.lossy = LossyStore(cluster.sync_store(self.broker._store))
        self.broker._store = self.lossy
        self.id = self.broker.engine_id
        self.held: dict[str, tuple[Claimed, int]] = {}
        self.pending: list[TokenFrame] = []  # handed in, not known to be stored
        self.to_finish: dict[str, int] = {}  # claimed with their last frame recorded: FINISH comes next


class BrokerMachine(RuleBasedStateMachine):
    def __init__(self, cluster, card, tokenizer_files) -> None:
        super().__init__()
        self.cluster, self.files = cluster, tokenizer_files
        self.card = type(card)(**{f: getattr(card, f) for f in card.__struct_fields__} | {"id": MODEL})
        self.client = cluster.client
        cluster.flush()
        self.runner = asyncio.Runner()
        self.reference = Reference()
        self.next_id = 0
        self.gateways = [self.new_gateway() for _ in range(2)]
        self.dead_gateways: set[str] = set()
        self.last_read: dict[str, bytes] = {}
        self.clients: dict[str, Client] = {}
        self.engines: list[Engine] = [self.new_engine() for _ in range(3)]

    # --- pieces -----------------------------------------------------------------------------------------------------

    def new_gateway(self) -> GatewayBroker:
        self.next_id += 1
        gateway = GatewayBroker(self.cluster.url, stream_ttl=600, boot_id=f"gateway{self.next_id}")
        gateway._store = self.cluster.async_store(gateway._store)
        self.runner.run(gateway.start())
        return gateway

    def new_engine(self, engine_id: str | None = None) -> Engine:
        self.next_id += 1  # no random names: a failure must come again when it is replayed
        engine = Engine(self.cluster, engine_id or f"engine{self.next_id}")
        engine.broker.register(self.card, self.files)
        return engine

    def waiting_or_running(self) -> list[str]:
        return [i for i, r in self.reference.requests.items() if r.state != "ended"]

    def owned(self, engine: Engine) -> set[str]:
        return {i.decode() for i in self.client.hkeys(POOL + "owned:" + engine.id)}

    def exchange(self, engine: Engine, frames: list[TokenFrame], max_requests: int, cut: int | None = None) -> None:
        by_gateway: dict[str, list[TokenFrame]] = {}
        for frame in frames:
            gateway = self.reference.requests[frame.request_id].request.gateway
            by_gateway.setdefault(gateway, []).append(frame)
        lost = self.client.zscore(POOL + "engines", engine.id) is None
        before = set(self.reference.held_by(engine.id))
        life = engine.broker._life
        known_to_engine = set(engine.broker._held)
        engine.pending += frames
        engine.lossy.cut = cut
        scripts_ran = []
        run = engine.lossy.run

        def noting(*commands):
            try:
                return run(*commands)
            finally:
                scripts_ran.append({s for s in connection.SCRIPTS if engine.lossy.ran_script(s)})

        engine.broker._store = type("Noting", (), {"run": staticmethod(noting), "close": engine.lossy.close})()
        try:
            outcome = engine.broker.exchange(by_gateway, None, max_requests=max_requests, max_blocks=BLOCKS)
        except BrokerUnavailable:
            outcome = None
        finally:
            engine.broker._store = engine.lossy
            engine.lossy.cut = None
        ran = set().union(*scripts_ran)
        if lost:
            assert outcome is None or (outcome.lease_lost and set(outcome.fenced) == known_to_engine)
        if connection.PROGRESS in ran:
            for frame in engine.pending:
                self.reference.record(engine.id, frame)
        if connection.CLAIM in ran and not lost:
            for frame in engine.pending:
                if frame.finish:
                    self.reference.finish(engine.id, frame.request_id, frame.epoch)
            for request_id, epoch in engine.to_finish.items():
                self.reference.finish(engine.id, request_id, epoch)
            self.reference.expire()
            before &= set(self.reference.held_by(engine.id))
            self.reference.claim(engine.id, self.owned(engine) - before, max_requests)
        if outcome is None:
            return
        engine.pending.clear()
        engine.to_finish.clear()
        if outcome.lease_lost:
            self.reference.release(engine.id, life, death=False)
            engine.held.clear()
            return
        for request_id in outcome.fenced:
            engine.held.pop(request_id, None)
        for claimed in outcome.claimed:
            delivered = sum(len(f.token_ids) for f in claimed.delivered)
            assert delivered == self.reference.requests[claimed.request.id].recorded
            engine.held[claimed.request.id] = claimed, delivered
        mine = self.reference.held_by(engine.id)
        engine.to_finish = {i: r.epoch for i, r in mine.items() if r.done}
        assert {i: c.epoch for i, (c, _) in engine.held.items()} == {i: r.epoch for i, r in mine.items() if not r.done}
        ends = list(outcome.cancelled)
        for request_id, (claimed, _) in engine.held.items():
            if claimed.request.gateway in outcome.gone_gateways and not claimed.request.logged:
                ends.append(request_id)
        last = [self.frame(engine, i, 0, FinishReason.CANCELLED) for i in dict.fromkeys(ends) if i in engine.held]
        if last:
            self.exchange(engine, last, 0)

    def frame(self, engine: Engine, request_id: str, count: int, finish: FinishReason | None) -> TokenFrame:
        claimed, seq = engine.held[request_id]
        after = seq + count
        if finish:
            del engine.held[request_id]
        else:
            engine.held[request_id] = claimed, after
        usage = Usage(len(claimed.request.prompt), after) if finish else None
        return TokenFrame(request_id, claimed.epoch, seq, list(range(seq, after)), finish=finish, usage=usage)

    def read(self) -> None:
        for request_id, r in self.reference.requests.items():
            if r.request.logged:
                self.clients["log " + request_id] = Client()
                for _, fields in self.client.xrange(keys.log(request_id)):
                    for frame in decode_frames(fields[b"f"]) if b"f" in fields else []:
                        self.clients["log " + request_id].accept(frame)
        for gateway in self.gateways:
            key = keys.frames(gateway.boot_id)
            for entry, fields in self.client.xrange(key, min="(" + self.last_read.get(key, b"0-0").decode()):
                self.last_read[key] = entry
                for frame in decode_frames(fields[b"f"]) if b"f" in fields else []:
                    self.clients.setdefault(frame.request_id, Client()).accept(frame)

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(
        gateway=st.integers(0, 1),
        kinds=st.lists(
            st.tuples(
                st.sampled_from(TENANTS),
                st.sampled_from(CLASSES),
                st.integers(-1, 1),  # priority
                st.sampled_from((0.5, 1.0, 3.0)),  # weight
                st.booleans(),  # logged
                st.booleans(),  # with a deadline
            ),
            min_size=1,
            max_size=4,
        ),
    )
    def enqueue(self, gateway, kinds):
        for tenant, service_class, priority, weight, logged, deadline in kinds:
            self.next_id += 1
            request = GenerationRequest(
                id=f"r{self.next_id}",
                model=MODEL,
                prompt=[1] * (1 + self.next_id % 5),
                sampling=SamplingParams(max_tokens=9),
                gateway=self.gateways[gateway].boot_id,
                tenant=tenant,
                service_class=service_class,
                priority=priority,
                weight=weight,
                logged=logged,
                deadline_ms=2**45 if deadline else None,
            )
            self.runner.run(self.gateways[gateway].enqueue(request, self.card))
            self.reference.enqueue(request)

    @rule(
        which=st.integers(0, 2),
        max_requests=st.integers(0, 3),
        counts=st.lists(st.sampled_from((0, 1, 1, 2, -1)), max_size=4),
        cut=st.sampled_from((None, 0, 1, 2, 9)),
    )
    def step(self, which, max_requests, counts, cut):
        """Some of what it holds gets tokens, -1 being the last frame; the connection may break after `cut` commands,
        and then, mostly, the exchange is tried again."""
        engine = self.engines[which]
        frames = []
        for request_id, count in zip(list(engine.held), counts, strict=False):
            if count:
                finish = FinishReason.LENGTH if count < 0 else None
                frames.append(self.frame(engine, request_id, abs(count), finish))
        self.exchange(engine, frames, max_requests, cut)
        if cut is not None and max_requests:
            self.exchange(engine, [], max_requests - 1)

    @rule(which=st.integers(0, 2), count=st.integers(1, 3), max_requests=st.integers(1, 4))
    def turn(self, which, count, max_requests):
        """An ordinary iteration: everything it holds gets tokens."""
        engine = self.engines[which]
        self.exchange(engine, [self.frame(engine, i, count, None) for i in list(engine.held)], max_requests)

    @rule(
        data=st.data(),
        gateway=st.integers(0, 1),
        what=st.sampled_from(("cancel", "cancel", "repeat", "reap", "deadlines", "gateway dies")),
    )
    def gateway_acts(self, data, gateway, what):
        live = self.waiting_or_running()
        if what == "cancel" and self.reference.requests:
            request_id = data.draw(st.sampled_from(list(self.reference.requests)))
            self.runner.run(self.gateways[gateway].cancel(MODEL, request_id))
            self.reference.cancel(request_id)
        elif what == "repeat" and live:
            request = self.reference.requests[data.draw(st.sampled_from(live))].request
            self.runner.run(self.gateways[gateway].enqueue(request, self.card))
        elif what == "reap":
            self.reap(gateway)
        elif what == "deadlines":  # the clock jumps past some
            for request_id in live:
                r = self.reference.requests[request_id]
                if r.waits and r.request.deadline_ms and data.draw(st.booleans()):
                    self.client.zadd(POOL + "deadlines", {request_id: 1}, xx=True)
                    r.overdue = True
        elif what == "gateway dies":
            self.read()
            self.client.delete(keys.frames(self.gateways[gateway].boot_id))
            self.dead_gateways.add(self.gateways[gateway].boot_id)
            self.gateways[gateway] = self.new_gateway()

    @rule(
        which=st.integers(0, 2),
        gateway=st.integers(0, 1),
        what=st.sampled_from(("dies", "dies", "pauses", "returns under its name", "restarts in place", "drains")),
    )
    def engine_stops(self, which, gateway, what):
        engine = self.engines[which]
        if what == "drains":
            return self.drain(which)
        holds_lease = self.client.zscore(POOL + "engines", engine.id) is not None
        if holds_lease:
            if what != "restarts in place":  # the clock jumps past its lease
                self.client.zadd(POOL + "engines", {engine.id: 1})
                self.reap(gateway)
            self.reference.release(engine.id, engine.broker._life, death=True)
        if what != "pauses":
            self.engines[which] = self.new_engine(None if what == "dies" else engine.id)

    def drain(self, which):
        engine = self.engines[which]
        self.exchange(engine, [], 0)
        self.exchange(engine, [], 0)
        engine.broker.close()
        self.reference.release(engine.id, engine.broker._life, death=False)
        self.engines[which] = self.new_engine()

    def reap(self, gateway):
        self.runner.run(self.gateways[gateway].reap(MODEL))
        self.reference.expire()

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def every_count_is_true(self):
        requests = self.reference.requests.values()
        waiting = [r for r in requests if r.waits]
        stats = {k.decode(): int(v) for k, v in self.client.hgetall(POOL + "stats").items() if int(v)}
        expected = Counter[str]()
        tenants = Counter[str]()
        for r in waiting:
            size = len(encode(r.request))
            expected.update({r.request.service_class: 1, "bytes": size, "tokens": r.tokens})
            tenant = r.request.tenant
            tenants.update({f"depth:{tenant}": 1, f"bytes:{tenant}": size, f"tokens:{tenant}": r.tokens})
        assert stats == expected
        assert {k.decode(): int(v) for k, v in self.client.hgetall(POOL + "tenants").items()} == tenants
        suspects = {i for i, r in self.reference.requests.items() if r.state == "suspect"}
        assert {i.decode() for i in self.client.zrange(POOL + "suspects", 0, -1)} == suspects
        for service_class in CLASSES:
            queued = {
                i: r
                for i, r in self.reference.requests.items()
                if r.state == "queued" and r.request.service_class == service_class
            }
            assert {i.decode() for i in self.client.zrange(POOL + "queue:" + service_class, 0, -1)} == set(queued)
            turns = {t.decode() for t in self.client.zrange(POOL + "turns:" + service_class, 0, -1)}
            assert turns == {r.request.tenant for r in queued.values()}
            for tenant in turns:
                line = self.client.zrange(f"{POOL}line:{service_class}/{tenant}", 0, -1)
                assert {i.decode() for i in line} == {i for i, r in queued.items() if r.request.tenant == tenant}

    @invariant()
    def nothing_runs_twice(self):
        owners = Counter(i for engine in self.engines for i in self.owned(engine))
        running = {i for i, r in self.reference.requests.items() if r.state == "running"}
        assert owners == Counter(running)

    @invariant()
    def clients_see_each_position_once(self):
        self.read()
        for client in self.clients.values():
            assert client.tokens == list(range(len(client.tokens)))

    def teardown(self):
        try:
            self.run_to_the_end()
        finally:
            for gateway in self.gateways:
                self.runner.run(gateway.close())
            self.runner.close()

    def run_to_the_end(self):
        for which in range(3):
            self.drain(which)
            self.engines[which].broker.close()
        self.engines = [self.new_engine()]
        (engine,) = self.engines
        for _ in range(200):
            frames = []
            for request_id, (_, seq) in list(engine.held.items()):
                frames.append(self.frame(engine, request_id, 1, FinishReason.LENGTH if seq >= 8 else None))
            self.exchange(engine, frames, 3)
            if not self.waiting_or_running() and not engine.held:
                break
        self.exchange(engine, [], 0)
        engine.broker.close()
        self.reap(0)
        self.every_count_is_true()
        self.clients_see_each_position_once()
        assert not self.waiting_or_running(), "lost"
        for request_id, r in self.reference.requests.items():
            if r.request.gateway not in self.dead_gateways:
                assert self.clients[request_id].finish is not None, request_id
            if r.request.logged:
                assert self.clients["log " + request_id].finish is not None, request_id
        letters = [fields[b"id"].decode() for _, fields in self.client.xrange(POOL + "dead")]
        assert Counter(letters) == Counter(self.reference.buried)
        rest = {k for k in self.cluster.key_names() if not k.startswith(("noria:log:", "noria:frames:"))}
        assert rest - {POOL + "dead"} == {POOL + "card", POOL + "tokenizer", POOL + "drain", "noria:pools"}


@pytest.mark.parametrize("model_store", ["redis", "valkey", "cluster"], indirect=True)
def test_any_interleaving(model_store, card, tokenizer_files, monkeypatch):
    monkeypatch.setattr(gateway_broker, "HOUSEKEEPING_EVERY", 3600.0)
    monkeypatch.setattr(recorder, "FOLD_EVERY", 3)  # so that all of it happens within a few steps
    share = 8 if isinstance(model_store.client, redis.RedisCluster) else 5  # it takes a round trip for each command
    run_state_machine_as_test(
        lambda: BrokerMachine(model_store, card, tokenizer_files),
        settings=settings(max_examples=settings.default.max_examples // share, stateful_step_count=30, deadline=None),
    )
