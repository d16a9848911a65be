"""A tenant's line and its share: weights, priorities, the ageing bound, limits, waiting times and positions."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from noria.engine.wire.backpressure import QueueLimits
from noria.engine.wire.broker import GatewayBroker, QueueFull, QueuePosition, TenantQueueFull
from noria.engine.wire.engine_broker import MAX_PASSED_OVER
from noria.engine.wire.messages import FinishReason

MODEL = "demo/model"


def claim_one_by_one(engine, step, count: int) -> list[str]:
    return [c.request.id for _ in range(count) for c in step(engine, max_requests=1).claimed]


@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.5, 1.5)])
async def test_backlogged_tenants_share_tokens_by_weight(gateway, make_engine, make_request, step, card, weights):
    for i in range(80):
        for tenant, weight in zip("ab", weights, strict=True):
            request = make_request(f"{tenant}{i:02}", tenant=tenant, weight=weight, prompt=4 + i % 3)
            await gateway.enqueue(request, card)
    claimed = claim_one_by_one(make_engine(), step, 80)
    shares = Counter(request_id[0] for request_id in claimed)
    assert abs(shares["b"] / shares["a"] - 3) < 0.3, shares


async def test_weighted_shares_hold_in_tokens_truly_generated(gateway, make_engine, make_request, step, row, card):
    """One tenant ends early, the other uses all it asked for: what counts is what they got, corrected at the end."""
    engine = make_engine()
    for i in range(150):
        await gateway.enqueue(make_request(f"a{i:03}", tenant="a", weight=1.0, max_tokens=100), card)
        await gateway.enqueue(make_request(f"b{i:03}", tenant="b", weight=3.0, max_tokens=100), card)
    tokens: Counter[str] = Counter()
    for _ in range(150):
        (claimed,) = step(engine, max_requests=1).claimed
        tenant = claimed.request.tenant
        count = 36 if tenant == "a" else 96
        step(engine, row(claimed, 0, [1] * count, FinishReason.STOP))
        tokens[tenant] += 4 + count
    assert abs(tokens["b"] / tokens["a"] - 3) < 0.3, tokens


async def test_priority_orders_one_tenant_and_overtakes_no_other(gateway, make_engine, make_request, step, card):
    for i in range(6):
        await gateway.enqueue(make_request(f"a{i}", tenant="a", priority=(5, 0, -3, 0, 5, -3)[i]), card)
        await gateway.enqueue(make_request(f"b{i}", tenant="b"), card)
    claimed = claim_one_by_one(make_engine(), step, 12)
    assert [i for i in claimed if i[0] == "a"] == ["a2", "a5", "a1", "a3", "a0", "a4"]
    assert [i for i in claimed if i[0] == "b"] == [f"b{i}" for i in range(6)]
    for count in range(2, 13, 2):
        assert Counter(i[0] for i in claimed[:count]) == {"a": count // 2, "b": count // 2}


async def test_extreme_priorities_are_clamped_and_still_first_come_first_served(
    gateway, make_engine, make_request, step, card
):
    for i, priority in enumerate((10**18, -(10**18), 10**12, -(10**12))):
        await gateway.enqueue(make_request(f"r{i}", priority=priority), card)
    assert claim_one_by_one(make_engine(), step, 4) == ["r1", "r3", "r0", "r2"]
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight"):
            await gateway.enqueue(make_request("r", weight=weight), card)


@pytest.mark.parametrize("fresh_tenants", [False, True], ids=["later ones are more urgent", "every one is new"])
async def test_nobody_is_passed_over_for_ever(gateway, make_engine, make_request, step, card, fresh_tenants):
    """While ever more come that go first, the one that has waited longest is passed over so often and no more."""
    engine = make_engine()
    if fresh_tenants:  # `z` has had its turn, and everybody new starts at the virtual time, before it
        for i in range(2):
            await gateway.enqueue(make_request(f"z{i}", tenant="z", max_tokens=1000), card)
        claim_one_by_one(engine, step, 1)
    for i in range(3):
        await gateway.enqueue(make_request(f"late{i}", tenant="z", priority=9), card)
    claimed: list[str] = []
    for i in range(5 * (MAX_PASSED_OVER + 1)):
        tenant = f"t{i:04}" if fresh_tenants else "z"
        await gateway.enqueue(make_request(f"n{i}", tenant=tenant, priority=0), card)
        claimed += claim_one_by_one(engine, step, 1)
    waited = ["z1", "late0", "late1", "late2"] if fresh_tenants else ["late0", "late1", "late2"]
    assert [i for i in claimed if i in waited] == waited
    assert [claimed.index(i) for i in waited] == [(k + 1) * (MAX_PASSED_OVER + 1) - 1 for k in range(len(waited))]


async def test_tenant_and_pool_limits_are_told_apart(server, make_engine, make_request, step, row, card):
    limits = QueueLimits(depth=5, size=10**6, tenant_depth=3, tenant_size=40_000)
    gateway = GatewayBroker(server.url, limits=limits)
    for i in range(3):
        await gateway.enqueue(make_request(f"a{i}", tenant="a", max_tokens=996), card)
    with pytest.raises(TenantQueueFull) as unknown:
        await gateway.enqueue(make_request("a3", tenant="a"), card)
    assert 4 <= unknown.value.retry_after <= 6  # nothing has been finished yet
    with pytest.raises(TenantQueueFull):
        await gateway.enqueue(make_request("b", tenant="b", prompt=50_000), card)
    for i in range(2):
        await gateway.enqueue(make_request(f"b{i}", tenant="b", max_tokens=996), card)
    with pytest.raises(QueueFull) as full:
        await gateway.enqueue(make_request("c", tenant="c"), card)
    assert type(full.value) is QueueFull
    engine = make_engine()
    claimed = step(engine, max_requests=1).claimed
    await gateway.enqueue(make_request("c", tenant="c", max_tokens=996), card)
    server.client.hset("noria:{demo/model}:drain", "rate", 500)  # 5000 tokens wait: 10 s
    with pytest.raises(QueueFull) as full:
        await gateway.enqueue(make_request("d", tenant="d"), card)
    assert 8 <= full.value.retry_after <= 12
    server.client.hset("noria:{demo/model}:drain", "rate", 1)
    with pytest.raises(QueueFull) as full:
        await gateway.enqueue(make_request("d", tenant="d"), card)
    assert 45 < full.value.retry_after <= 60
    step(engine, row(claimed[0], 0, [], FinishReason.STOP), max_requests=9)
    assert server.client.hgetall("noria:{demo/model}:tenants") == {}
    await gateway.close()


async def test_the_drain_rate_is_measured_while_there_is_work(
    server, gateway, make_engine, make_request, step, row, card
):
    engine = make_engine()
    for i in range(60):
        await gateway.enqueue(make_request(f"r{i}", max_tokens=96), card)
    for _ in range(15):  # 100 tokens every 0.1 s
        (claimed,) = step(engine, max_requests=1).claimed
        await asyncio.sleep(0.1)
        step(engine, row(claimed, 0, [1], FinishReason.STOP))
    rate = float(server.client.hget("noria:{demo/model}:drain", "rate"))
    assert 300 < rate < 1100
    position = await gateway.position(MODEL, "r34")
    assert position == QueuePosition(19, 1900, pytest.approx(1900 / rate))


async def test_positions(server, gateway, make_engine, make_request, step, card):
    engine = make_engine()
    for i in range(4):
        await gateway.enqueue(make_request(f"a{i}", tenant="a", priority=-(i // 3)), card)  # a3 goes first
    for i in range(2):
        await gateway.enqueue(make_request(f"b{i}", tenant="b"), card)
    await gateway.enqueue(make_request("urgent", service_class="priority"), card)

    async def ahead(request_id: str) -> int | None:
        position = await gateway.position(MODEL, request_id)
        return None if position is None else position.ahead

    waiting = ["a0", "a1", "a2", "a3", "b0", "b1", "urgent"]
    guessed = {i: await ahead(i) for i in waiting}
    (claimed,) = step(engine, max_requests=1).claimed
    assert await ahead(claimed.request.id) is None
    assert await ahead("never seen") is None
    engine.close()  # handed back: it waits again
    assert await ahead(claimed.request.id) == 0
    claimed_in_order = [c.request.id for c in step(make_engine(), max_requests=9).claimed]
    assert sorted(claimed_in_order) == waiting
    for place, request_id in enumerate(claimed_in_order):
        assert abs(guessed[request_id] - place) <= 1, (guessed, claimed_in_order)
