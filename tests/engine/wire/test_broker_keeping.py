"""What the store keeps beside the queue: logs of requests that outlive their gateway, and records of tenants."""

from __future__ import annotations

import asyncio

import pytest

from noria.engine.wire.broker import GatewayBroker
from noria.engine.wire.messages import FinishReason

MODEL = "demo/model"
LOG = "noria:log:r"


async def logged(gateway) -> list:
    return [frame async for frames in gateway.log_frames("r") for frame in frames]


async def test_a_log_is_read_from_its_beginning_and_live(server, gateway, make_engine, make_request, step, row, card):
    engine = make_engine()
    await gateway.enqueue(make_request("r", logged=True), card)
    await gateway.enqueue(make_request("other"), card)
    (claimed, other) = step(engine, max_requests=2).claimed
    step(engine, row(claimed, 0, [1]), row(other, 0, [9]))
    elsewhere = GatewayBroker(server.url)  # any gateway may read it
    reading = asyncio.create_task(logged(elsewhere))
    await asyncio.sleep(0.05)
    step(engine, row(claimed, 1, [2]))
    step(engine, row(claimed, 2, [3], FinishReason.STOP))
    frames = await asyncio.wait_for(reading, 5)
    assert [(f.seq, f.token_ids) for f in frames] == [(0, [1]), (1, [2]), (2, [3])]
    assert await logged(gateway) == frames
    assert 590_000 < server.client.pttl(LOG) <= 600_000
    assert server.client.keys("noria:log:*") == [LOG.encode()]
    with pytest.raises(KeyError):
        await anext(gateway.log_frames("unknown"))
    await elsewhere.close()


async def test_a_logged_request_outlives_its_gateway_and_its_engine(
    server, gateway, make_engine, make_request, step, row, card
):
    first, second = make_engine(gone_after=0.0), make_engine(gone_after=0.0)
    await gateway.enqueue(make_request("r", logged=True, gateway="gone"), card)
    (claimed,) = step(first, max_requests=1).claimed
    assert step(first, row(claimed, 0, [1])).gone_gateways == ["gone"]
    assert step(first, row(claimed, 1, [2])).fenced == []  # its engine goes on
    server.client.zadd("noria:{demo/model}:engines", {first.engine_id: 1})
    await gateway.reap(MODEL)
    (claimed,) = step(second, max_requests=1).claimed
    assert claimed.request.logged
    step(second, row(claimed, 2, [3], FinishReason.LENGTH))
    tokens = {f.seq: f.token_ids for f in await logged(gateway)}
    assert tokens == {0: [1], 1: [2], 2: [3]}


@pytest.mark.parametrize("ended_by", ["cancel", "deadline", "unreadable"])
async def test_endings_by_the_store_are_logged(server, gateway, make_engine, make_request, step, card, ended_by):
    await gateway.enqueue(make_request("r", logged=True, deadline_ms=1 if ended_by == "deadline" else None), card)
    if ended_by == "cancel":
        await gateway.cancel(MODEL, "r")
    elif ended_by == "unreadable":
        server.client.hset("noria:{demo/model}:request:r", "body", b"\xc1")
    step(make_engine(), max_requests=1)
    (last,) = await logged(gateway)
    wanted = {"cancel": FinishReason.CANCELLED, "deadline": FinishReason.EXPIRED, "unreadable": FinishReason.ERROR}
    assert last.finish is wanted[ended_by]
    assert 0 < server.client.pttl(LOG) <= 600_000


async def test_an_ending_whose_reply_is_lost_is_published_by_the_next_reaper(
    server, gateway, make_request, reader, card
):
    await gateway.enqueue(make_request("r", deadline_ms=1), card)
    run = gateway._store.run

    async def cut(*commands):
        await run(*commands)
        raise ConnectionError("cut")

    gateway._store.run = cut
    with pytest.raises(ConnectionError):
        await gateway.reap(MODEL)
    gateway._store.run = run
    await gateway.reap(MODEL)
    (last,) = await reader.last_of("r")
    assert last.finish is FinishReason.EXPIRED
    assert not server.client.exists("noria:{demo/model}:endings")


async def test_a_refused_request_leaves_no_log_and_a_repeat_keeps_it(server, gateway, make_request, card):
    await gateway.enqueue(make_request("r", logged=True), card)
    await gateway.enqueue(make_request("r", logged=True), card)
    assert server.client.xlen(LOG) == 1
    gateway._limits = type(gateway._limits)(depth=1)
    with pytest.raises(Exception, match="full"):
        await gateway.enqueue(make_request("s", logged=True), card)
    assert not server.client.exists("noria:log:s")


async def test_records(server, gateway):
    other = GatewayBroker(server.url)
    assert await gateway.remember("t{1}", "key", b"mine", 60) is None
    assert await gateway.remember("t{1}", "key", b"mine", 60) is None  # a repeat after a lost reply
    assert await other.remember("t{1}", "key", b"theirs", 60) == b"mine"
    assert await other.remember("t2", "key", b"theirs", 60) is None
    assert await other.recall("t{1}", "key") == b"mine"
    await other.replace("t{1}", "key", b"result", 0.05)
    assert await gateway.recall("t{1}", "key") == b"result"
    await asyncio.sleep(0.08)
    assert await gateway.recall("t{1}", "key") is None
    await gateway.forget("t2", "key")
    await gateway.forget("t2", "key")
    assert await gateway.recall("t2", "key") is None
    assert not server.client.keys("noria:*record*")
    await other.close()
