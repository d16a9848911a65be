"""Records that the scripts stumble over cost nobody but themselves; a script's own fault is told from an outage."""

from __future__ import annotations

import pytest

from noria.engine.wire.broker import BrokerUnavailable, StoreFault
from noria.engine.wire.messages import FinishReason

MODEL = "demo/model"
POOL = "noria:{demo/model}:"
BROKEN = POOL + "request:broken"


def as_string(client):
    client.delete(BROKEN)
    client.set(BROKEN, "not a hash")


DAMAGES = {
    "no size": lambda client: client.hdel(BROKEN, "size"),
    "no cost": lambda client: client.hset(BROKEN, "cost", "dear"),
    "no class": lambda client: client.hset(BROKEN, "class", "first"),
    "no body": lambda client: client.hdel(BROKEN, "body"),
    "no hash": as_string,
    "no progress": lambda client: client.hset(POOL + "progress:broken", "a", 1),
}


def letters(server):
    fields = [fields for _, fields in server.client.xrange(POOL + "dead")]
    return [(f[b"id"], f[b"error"].startswith(b"its record cannot be used")) for f in fields]


def at_rest(server):
    """Nothing of any request is left."""
    left = ("request:", "progress:", "owned:", "queue:", "line:", "turns:", "suspects", "deadlines", "stats", "tenants")
    return not [key for key in server.key_names() if key.startswith(POOL) and any(name in key for name in left)]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_a_waiting_request_that_cannot_be_read_is_given_up_alone(
    server, gateway, make_engine, make_request, reader, step, row, card, damage
):
    engine = make_engine()
    for request_id in ("before", "broken", "behind"):
        await gateway.enqueue(make_request(request_id, tenant=request_id, deadline_ms=2**45), card)
    damage(server.client)
    claimed = step(engine, max_requests=9).claimed
    assert sorted(c.request.id for c in claimed) == ["before", "behind"]
    step(engine, *(row(c, 0, [1], FinishReason.STOP) for c in claimed))
    known = [i for i in ("before", "behind", "broken") if i != "broken" or damage is not as_string]
    lasts = {f.request_id: f for f in await reader.last_of(*known)}
    if damage is not as_string:  # else nobody knows whose it was
        assert lasts["broken"].finish is FinishReason.ERROR and "record" in lasts["broken"].error
    assert letters(server) == [(b"broken", True)]
    assert at_rest(server)


async def test_a_record_that_broke_while_it_ran_holds_up_no_finish(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine()
    for request_id in ("broken", "fine"):
        await gateway.enqueue(make_request(request_id), card)
    broken, fine = step(engine, max_requests=2).claimed
    server.client.hset(BROKEN, "tokens", "many")
    step(engine, row(broken, 0, [1], FinishReason.STOP), row(fine, 0, [1], FinishReason.STOP))
    assert {f.finish for f in await reader.last_of("broken", "fine")} == {FinishReason.STOP}
    assert letters(server) == [] and at_rest(server)


async def test_a_record_that_broke_while_it_ran_holds_up_no_reaper(
    server, gateway, make_engine, make_request, reader, step, row, card, lapse
):
    engine = make_engine()
    for request_id in ("broken", "fine"):
        await gateway.enqueue(make_request(request_id), card)
    broken, fine = step(engine, max_requests=2).claimed
    step(engine, row(broken, 0, [1]), row(fine, 0, [1]))
    server.client.hdel(BROKEN, "block_size")
    lapse(engine)
    assert await gateway.reap(MODEL) == 1
    (again,) = step(make_engine(), max_requests=2).claimed
    assert again.request.id == "fine" and [f.token_ids for f in again.delivered] == [[1]]
    (last,) = await reader.last_of("broken")
    assert last.finish is FinishReason.ERROR and last.usage.completion_tokens == 1
    assert letters(server) == [(b"broken", True)]


async def test_a_scripts_fault_is_not_an_outage(server, gateway, make_engine, make_request, step, row, card):
    engine = make_engine()
    await gateway.enqueue(make_request("running"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    server.client.set(POOL + "virtual_time", "not a hash")
    with pytest.raises(StoreFault, match="WRONGTYPE"):
        await gateway.enqueue(make_request("r"), card)
    server.client.delete(POOL + "virtual_time")
    server.client.set(POOL + "stats", "not a hash")
    server.client.set(POOL + "queue:default", "not a set")
    with pytest.raises(StoreFault, match="WRONGTYPE"):
        step(engine, row(claimed, 0, [1]), max_requests=1)
    server.client.delete(POOL + "stats", POOL + "queue:default")
    engine.close()  # what it held goes back, its frame too
    (again,) = step(make_engine(), max_requests=1).claimed
    assert [f.token_ids for f in again.delivered] == [[1]]


async def test_a_full_store_condemns_nobody(server, gateway, make_engine, make_request, step, row, card, lapse):
    engine = make_engine()
    for request_id in ("a", "b"):
        await gateway.enqueue(make_request(request_id), card)
    (claimed,) = step(engine, max_requests=1).claimed
    step(engine, row(claimed, 0, [1]))
    lapse(engine)
    server.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(BrokerUnavailable, match="memory"):
            await gateway.reap(MODEL)
        with pytest.raises(BrokerUnavailable, match="memory"):
            await gateway.enqueue(make_request("c"), card)
    finally:
        server.client.config_set("maxmemory", 0)
    await gateway.reap(MODEL)
    other = make_engine()
    claims = [c for _ in range(2) for c in step(other, max_requests=2).claimed]
    assert [c.request.id for c in claims] == ["a", "b"] and [f.token_ids for f in claims[0].delivered] == [[1]]
    assert not server.client.exists(POOL + "dead")
