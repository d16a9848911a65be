"""Whatever dies: engines (fencing, resumption, poison, hand-back), lost replies, the store itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from noria.engine.wire import connection
from noria.engine.wire.broker import BrokerUnavailable, EngineBroker, GatewayBroker
from noria.engine.wire.messages import FinishReason

MODEL = "demo/model"
OWNED = "noria:{demo/model}:owned:"


async def lapse(server, engine) -> None:
    """Let the engine's lease run out on the server's clock."""
    server.client.zadd("noria:{demo/model}:engines", {engine.engine_id: 1})


async def test_a_dead_engines_request_resumes_after_what_was_recorded(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    first, second = make_engine(), make_engine()
    step(second)
    for request_id in ("r", "behind"):
        await gateway.enqueue(make_request(request_id, prompt=20), card)
    (claimed,) = step(first, max_requests=1).claimed
    step(first, row(claimed, 0, [5]))
    step(first, row(claimed, 1, [6, 7]))
    await reader.until(lambda frames: len(frames) == 2)
    server.client.xtrim(f"noria:frames:{gateway.boot_id}", maxlen=0)
    assert await gateway.reap(MODEL) == 0  # alive
    await lapse(server, first)
    assert await gateway.reap(MODEL) == 1
    assert await gateway.reap(MODEL) == 0
    resumed, behind = step(second, max_requests=2).claimed  # at its old place: before what came later
    assert (resumed.request.id, behind.request.id, resumed.epoch) == ("r", "behind", 2)
    assert [(f.seq, f.token_ids) for f in resumed.delivered] == [(0, [5]), (1, [6, 7])]
    # The paused engine comes back: its frame changes nothing, and it learns that it is fenced.
    late = step(first, row(claimed, 3, [99]))
    assert late.lease_lost or late.fenced == ["r"]
    step(second, row(resumed, 3, [8]))
    step(second, row(resumed, 4, [], FinishReason.LENGTH), row(behind, 0, [], FinishReason.STOP))
    await reader.last_of("r", "behind")
    mine = [f for f in reader.all if f.request_id == "r" and f.epoch == 2]
    assert [(f.seq, f.token_ids) for f in mine] == [(0, [5]), (1, [6, 7]), (3, [8]), (4, [])]  # republished, then on
    assert not [key for key in server.key_names() if "request:" in key or "progress:" in key or "owned:" in key]


async def test_a_paused_engine_publishes_nothing_after_its_lease(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine, other = make_engine(lease_seconds=0.3), make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    step(engine, row(claimed, 0, [1]))
    await asyncio.sleep(0.4)
    assert await gateway.reap(MODEL) == 1
    outcome = step(engine, row(claimed, 1, [99]))
    assert (outcome.lease_lost, outcome.fenced, outcome.claimed) == (True, ["r"], [])
    (resumed,) = step(other, max_requests=1).claimed
    assert [f.token_ids for f in resumed.delivered] == [[1]]
    assert step(engine, max_requests=1).lease_lost is False  # it has a lease again
    step(other, row(resumed, 1, [2], FinishReason.STOP))
    await reader.last_of("r")
    assert 99 not in [token for f in reader.all for token in f.token_ids]


async def test_an_engine_that_claims_again_is_fenced_from_its_own_past(
    server, gateway, make_engine, make_request, step, row, card
):
    first, second = make_engine(engine_id="same"), make_engine()
    await gateway.enqueue(make_request("r"), card)
    (past,) = step(first, max_requests=1).claimed
    await lapse(server, first)
    await gateway.reap(MODEL)
    (present,) = step(make_engine(engine_id="same"), max_requests=1).claimed
    assert (past.epoch, present.epoch) == (1, 2)
    assert step(first, row(past, 0, [99], FinishReason.STOP)).fenced == []  # it ended itself: nothing to drop …
    assert server.client.hget(OWNED + "same", "r") == b"2 0"  # … and nothing was ended or recorded
    assert step(first, row(present, 0, [1])).fenced == []
    assert step(second, row(present, 1, [2])).fenced == []  # never held it, so has nothing to drop
    assert server.client.hget(OWNED + "same", "r") == b"2 1"


async def test_a_late_renewal_keeps_what_nobody_took(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine(lease_seconds=0.2)
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    await gateway.close()  # nobody reaps
    await asyncio.sleep(0.3)
    outcome = step(engine, row(claimed, 0, [1]))
    assert (outcome.lease_lost, outcome.fenced) == (False, [])
    assert engine.renew()


async def test_the_heartbeat_keeps_a_slow_engine_and_reports_a_lost_lease(
    server, gateway, make_engine, make_request, step, row, card
):
    engine = make_engine(lease_seconds=0.5)
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    stop, lost = threading.Event(), threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            if not engine.renew():
                lost.set()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        await asyncio.sleep(1.0)  # a step of two leases
        assert await gateway.reap(MODEL) == 0
        assert step(engine, row(claimed, 0, [1])).fenced == []
        await lapse(server, engine)
        while not await gateway.reap(MODEL):  # the heartbeat may have renewed in between
            await lapse(server, engine)
        assert await asyncio.to_thread(lost.wait, 2)
        assert step(engine, row(claimed, 1, [2])).lease_lost
        lost.clear()
        assert engine.renew()
    finally:
        stop.set()
        thread.join()


async def test_poison_is_buried_after_two_deaths(server, gateway, make_engine, make_request, reader, step, row, card):
    request = make_request("poison")
    await gateway.enqueue(request, card)
    killed = []
    for life in (1, 2):
        engine = make_engine()
        (claimed,) = step(engine, max_requests=1).claimed
        assert claimed.epoch == life
        step(engine, row(claimed, life - 1, [life]))
        await lapse(server, engine)
        assert await gateway.reap(MODEL) == (1 if life == 1 else 0)
        killed.append(engine.engine_id)
    (last,) = await reader.last_of("poison")
    assert last.finish is FinishReason.ERROR and last.error and last.usage.completion_tokens == 2
    assert last.epoch > 2
    ((_, letter),) = server.client.xrange("noria:{demo/model}:dead")
    assert (letter[b"id"], letter[b"attempts"]) == (b"poison", b"2")
    assert letter[b"engines"].decode().split() == killed
    assert step(make_engine(), max_requests=1).claimed == []
    assert not [key for key in server.key_names() if "poison" in key]


async def test_hand_back_is_not_a_death(server, gateway, make_engine, make_request, reader, step, row, card):
    await gateway.enqueue(make_request("r"), card)
    for drain in range(4):
        engine = make_engine()
        (claimed,) = step(engine, max_requests=1).claimed
        assert [f.token_ids for f in claimed.delivered] == [[t] for t in range(drain)]
        step(engine, row(claimed, drain, [drain]))
        engine.close()
    engine = make_engine()
    (claimed,) = step(engine, max_requests=1).claimed
    step(engine, row(claimed, 4, [], FinishReason.STOP))
    assert (await reader.last_of("r"))[0].usage.completion_tokens == 4


async def test_an_engine_that_restarts_under_its_own_name_gives_back_first(
    gateway, make_engine, make_request, step, card
):
    await gateway.enqueue(make_request("r"), card)
    step(make_engine(engine_id="same"), max_requests=1)
    (claimed,) = step(make_engine(engine_id="same"), max_requests=1).claimed
    assert (claimed.request.id, claimed.epoch) == ("r", 2)


class CutStore:
    """A connection that breaks after the first `num_sent` commands of the next pipeline; no reply gets through."""

    def __init__(self, engine: EngineBroker, num_sent: int) -> None:
        self._engine, self._store, self._num_sent = engine, engine._store, num_sent
        engine._store = self

    def run(self, *commands):
        self._engine._store = self._store
        if self._num_sent:
            self._store.run(*commands[: self._num_sent])
        raise BrokerUnavailable("cut")


async def test_death_between_the_last_frame_and_finish_loses_nothing(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    first, second = make_engine(), make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(first, max_requests=1).claimed
    CutStore(first, 1)
    with pytest.raises(BrokerUnavailable):
        step(first, row(claimed, 0, [1, 2], FinishReason.STOP))
    await lapse(server, first)
    await gateway.reap(MODEL)
    assert step(second, max_requests=1).claimed == []  # nothing is left to compute
    (last,) = await reader.last_of("r")
    assert (last.token_ids, last.finish) == ([1, 2], FinishReason.STOP)
    step(second)
    assert not [key for key in server.key_names() if "request:" in key or "progress:" in key or "owned:" in key]


@pytest.mark.parametrize("num_sent", range(4))
async def test_a_broken_pipeline_neither_loses_nor_doubles(
    server, gateway, make_engine, make_request, reader, step, row, card, num_sent
):
    engine = make_engine()
    for request_id in ("a", "b", "c"):
        await gateway.enqueue(make_request(request_id), card)
    a, b = step(engine, max_requests=2).claimed
    step(engine, row(a, 0, [1]), row(b, 0, [1]))
    CutStore(engine, num_sent)  # progress, publication, claim: how many of them got through
    with pytest.raises(BrokerUnavailable):
        step(engine, row(a, 1, [2]), row(b, 1, [2], FinishReason.STOP), max_requests=1)
    await gateway.cancel(MODEL, "a")
    outcome = step(engine, row(a, 2, [3]), max_requests=1)
    assert [c.request.id for c in outcome.claimed] == ["c"]
    assert (outcome.cancelled, outcome.fenced) == (["a"], [])
    (c,) = outcome.claimed
    assert set(server.client.hkeys(OWNED + engine.engine_id)) == {b"a", b"c"}
    step(engine, row(a, 3, [], FinishReason.CANCELLED), row(c, 0, [], FinishReason.STOP))
    await reader.last_of("a", "b", "c")
    tokens = {f.seq: f.token_ids for f in reader.all if f.request_id == "a"}
    assert tokens == {0: [1], 1: [2], 2: [3], 3: []}
    assert not [key for key in server.key_names() if "request:" in key or "progress:" in key or "owned:" in key]


async def test_progress_stays_without_gap_when_the_store_lost_some(
    server, gateway, make_engine, make_request, step, row, card
):
    first, second = make_engine(), make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(first, max_requests=1).claimed
    step(first, row(claimed, 0, [1]))
    before = server.client.dump("noria:{demo/model}:progress:r")
    step(first, row(claimed, 1, [2]))
    server.client.restore("noria:{demo/model}:progress:r", 0, before, replace=True)
    server.client.hset(OWNED + first.engine_id, "r", "1 1")
    assert step(first, row(claimed, 2, [3])).fenced == []
    await lapse(server, first)
    await gateway.reap(MODEL)
    (resumed,) = step(second, max_requests=1).claimed
    assert [f.token_ids for f in resumed.delivered] == [[1]]


async def test_forgotten_scripts_are_sent_again(server, gateway, make_engine, make_request, reader, step, row, card):
    engine = make_engine()
    server.client.script_flush()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    server.client.script_flush()
    assert step(engine, row(claimed, 0, [1], FinishReason.STOP)).fenced == []
    await reader.last_of("r")
    server.client.script_flush()
    await gateway.cancel(MODEL, "r")
    assert await gateway.reap(MODEL) == 0
    assert engine.renew()


async def test_a_store_that_restarts_is_picked_up_by_everybody(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine()
    for request_id in ("running", "queued"):
        await gateway.enqueue(make_request(request_id), card)
    (claimed,) = step(engine, max_requests=1).claimed
    step(engine, row(claimed, 0, [1]))
    await reader.until(lambda frames: len(frames) == 1)
    listening = asyncio.create_task(reader.last_of("running"))
    server.kill()
    with pytest.raises(BrokerUnavailable):
        step(engine, row(claimed, 1, [2]))
    with pytest.raises(BrokerUnavailable):
        await gateway.enqueue(make_request("refused"), card)
    assert not await gateway.ping()
    await asyncio.sleep(1.1)
    with pytest.raises(BrokerUnavailable):
        await gateway.models()
    server.start()
    assert await gateway.ping()
    outcome = step(engine, row(claimed, 2, [3], FinishReason.STOP), max_requests=1)
    assert (outcome.lease_lost, outcome.fenced) == (False, [])
    assert [c.request.id for c in outcome.claimed] == ["queued"]
    await listening
    assert [f.token_ids for f in reader.all] == [[1], [2], [3]]
    await asyncio.sleep(0.3)
    assert [status.card for status in await gateway.models()] == [card]


async def test_a_store_that_hangs_is_given_up_in_time_and_found_again(
    server, gateway, make_engine, make_request, reader, step, row, card, monkeypatch
):
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT", 0.3)
    hasty, engine = GatewayBroker(server.url), make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    server.pause(True)
    try:
        for attempt in (lambda: hasty.models(), lambda: hasty.cancel(MODEL, "r")):
            with pytest.raises(BrokerUnavailable, match="no answer"):
                await attempt()
        with pytest.raises(BrokerUnavailable):
            step(engine, row(claimed, 0, [1]))
    finally:
        server.pause(False)
    # What was sent before the time ran out is carried out late: the repeat must not double it.
    outcome = step(engine, row(claimed, 1, [2], FinishReason.STOP))
    assert (outcome.lease_lost, outcome.fenced) == (False, [])
    await reader.last_of("r")
    assert {f.seq: f.token_ids for f in reader.all} == {0: [1], 1: [2]}
    await asyncio.sleep(0.3)
    assert [status.card for status in await hasty.models()] == [card]
    await hasty.close()


async def test_a_store_that_lost_everything_is_furnished_again(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine()
    request = make_request("r")
    await gateway.enqueue(request, card)
    (claimed,) = step(engine, max_requests=1).claimed
    server.client.flushall()
    outcome = step(engine, row(claimed, 0, [1]))
    assert (outcome.lease_lost, outcome.fenced) == (True, ["r"])
    await gateway.enqueue(request, card)  # the gateway sends its live requests again
    (claimed,) = step(engine, max_requests=1).claimed
    async with asyncio.timeout(5):
        while not server.client.exists(f"noria:frames:{gateway.boot_id}"):
            await asyncio.sleep(0.02)
    step(engine, row(claimed, 0, [1], FinishReason.STOP))
    await reader.last_of("r")
    fresh = GatewayBroker(server.url)
    assert [list(status.engines) for status in await fresh.models()] == [[engine.engine_id]]
    await fresh.close()


async def test_who_was_merely_in_a_batch_with_poison_is_not_condemned(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    """The engine dies whenever `poison` is computed: it is found out alone, all others are answered."""
    ids = [f"r{i}" for i in range(5)] + ["poison"] + [f"r{i}" for i in range(5, 9)]
    for request_id in ids:
        await gateway.enqueue(make_request(request_id), card)
    lives, engine, running = 1, make_engine(), {}
    for _ in range(60):
        running |= {c.request.id: c for c in step(engine, max_requests=9 - len(running)).claimed}
        if "poison" in running:
            await lapse(server, engine)
            await gateway.reap(MODEL)
            lives, engine, running = lives + 1, make_engine(), {}
            continue
        rows, going = [], {}
        for request_id, claimed in running.items():
            seq = int(server.client.hget(OWNED + engine.engine_id, request_id).split()[1])
            rows.append(row(claimed, seq, [seq], FinishReason.LENGTH if seq == 3 else None))
            if seq < 3:
                going[request_id] = claimed
        step(engine, *rows)
        running = going
    lasts = {f.request_id: f.finish for f in await reader.last_of(*ids)}
    assert lasts.pop("poison") is FinishReason.ERROR
    assert set(lasts.values()) == {FinishReason.LENGTH}
    assert lives == 3
    assert server.client.xlen("noria:{demo/model}:dead") == 1
    assert not [key for key in server.key_names() if "request:" in key or "trials" in key or "suspects" in key]


async def test_one_life_of_an_engine_counts_one_death(server, gateway, make_engine, make_request, step, card):
    """An engine that is paused again and again, and comes back each time, has died once at most."""
    await gateway.enqueue(make_request("r"), card)
    engine = make_engine()
    for _ in range(4):
        assert [c.request.id for c in step(engine, max_requests=1).claimed] == ["r"]
        await lapse(server, engine)
        assert await gateway.reap(MODEL) == 1
        assert step(engine).lease_lost
    assert server.client.hget("noria:{demo/model}:request:r", "attempts") == b"1"
    assert not server.client.exists("noria:{demo/model}:dead")


async def test_an_ending_by_the_store_publishes_what_was_recorded_but_never_published(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    CutStore(engine, 1)  # progress alone got through
    with pytest.raises(BrokerUnavailable):
        step(engine, row(claimed, 0, [7]))
    await lapse(server, engine)
    await gateway.reap(MODEL)
    await gateway.cancel(MODEL, "r")
    await reader.last_of("r")
    assert [(f.seq, f.token_ids, f.finish) for f in reader.all] == [(0, [7], None), (1, [], FinishReason.CANCELLED)]
