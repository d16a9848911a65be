"""The store goes and comes back: broken pipelines, lost replies, hangs, restarts, lost data."""

from __future__ import annotations

import asyncio

import pytest

from noria.engine.wire import connection
from noria.engine.wire.broker import BrokerUnavailable, EngineBroker, GatewayBroker
from noria.engine.wire.messages import FinishReason

MODEL = "demo/model"
OWNED = "noria:{demo/model}:owned:"


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
    server, gateway, make_engine, make_request, reader, step, row, card, lapse
):
    first, second = make_engine(), make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(first, max_requests=1).claimed
    CutStore(first, 1)
    with pytest.raises(BrokerUnavailable):
        step(first, row(claimed, 0, [1, 2], FinishReason.STOP))
    lapse(first)
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
    server, gateway, make_engine, make_request, step, row, card, lapse
):
    first, second = make_engine(), make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(first, max_requests=1).claimed
    step(first, row(claimed, 0, [1]))
    step(first, row(claimed, 1, [2]))
    server.client.rpop("noria:{demo/model}:journal:" + first.engine_id)
    assert step(first, row(claimed, 2, [3])).fenced == []
    lapse(first)
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
    server.write_out()
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


async def test_an_ending_by_the_store_publishes_what_was_recorded_but_never_published(
    server, gateway, make_engine, make_request, reader, step, row, card, lapse
):
    engine = make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    CutStore(engine, 1)  # progress alone got through
    with pytest.raises(BrokerUnavailable):
        step(engine, row(claimed, 0, [7]))
    lapse(engine)
    await gateway.reap(MODEL)
    await gateway.cancel(MODEL, "r")
    await reader.last_of("r")
    assert [(f.seq, f.token_ids, f.finish) for f in reader.all] == [(0, [7], None), (1, [], FinishReason.CANCELLED)]


async def test_an_outage_longer_than_the_lease_is_no_death(server, gateway, make_engine, make_request, step, row, card):
    """The first look after it prolongs what ran out meanwhile, once."""
    alive, dead, gone = make_engine(), make_engine(), make_engine()
    claims = {}
    for engine, name in ((alive, "a"), (dead, "d"), (gone, "g")):
        await gateway.enqueue(make_request(name), card)
        (claims[name],) = step(engine, max_requests=1).claimed
    seconds, _ = server.client.time()
    back = 1000 * seconds
    server.client.mset({"noria:{demo/model}:last_look": back - 10_000})
    ends = {alive.engine_id: back - 6_000, dead.engine_id: back - 6_000, gone.engine_id: back - 11_000}
    server.client.zadd("noria:{demo/model}:engines", ends)
    await gateway.reap(MODEL)
    assert _attempts(server, "a", "d", "g") == [0, 0, 1]
    assert step(alive, row(claims["a"], 0, [1])).fenced == []
    until = server.client.zscore("noria:{demo/model}:engines", dead.engine_id)
    assert back + 5_000 <= until < back + 10_000
    server.client.mset({"noria:{demo/model}:last_look": back - 10_000})
    server.client.zadd("noria:{demo/model}:engines", {dead.engine_id: until - 10_000})
    await gateway.reap(MODEL)
    assert _attempts(server, "a", "d", "g") == [0, 1, 1]


def _attempts(server, *request_ids):
    return [int(server.client.hget(f"noria:{{demo/model}}:request:{name}", "attempts")) for name in request_ids]
