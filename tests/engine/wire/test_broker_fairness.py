"""Order in the queue: weights between classes, fair shares in tokens between tenants, first come first served."""

from __future__ import annotations

from collections import Counter

from noria.engine.wire.messages import CLASSES, FinishReason


def claim_one_by_one(engine, step, count: int) -> list[str]:
    return [c.request.id for _ in range(count) for c in step(engine, max_requests=1).claimed]


async def test_classes_share_8_4_1_1_and_none_starves(gateway, make_engine, make_request, step, card):
    engine = make_engine()
    for i in range(60):
        for service_class in reversed(CLASSES):
            await gateway.enqueue(make_request(f"{service_class}-{i:02}", service_class=service_class), card)
    claimed = claim_one_by_one(engine, step, 70)
    assert claimed[0] == "priority-00"
    shares = Counter(request_id.split("-")[0] for request_id in claimed)
    for service_class, share in zip(CLASSES, (40, 20, 5, 5), strict=True):
        assert abs(shares[service_class] - share) <= 2, shares
        assert [i for i in claimed if i.startswith(service_class)] == sorted(
            i for i in claimed if i.startswith(service_class)
        )


async def test_one_claim_shares_like_many(gateway, make_engine, make_request, step, card):
    for i in range(60):
        for service_class in CLASSES:
            await gateway.enqueue(make_request(f"{service_class}-{i:02}", service_class=service_class), card)
    claimed = step(make_engine(), max_requests=70).claimed
    shares = Counter(c.request.service_class for c in claimed)
    assert all(abs(shares[c] - n) <= 2 for c, n in zip(CLASSES, (40, 20, 5, 5), strict=True)), shares


async def test_priority_overtakes_a_full_queue_and_an_idle_class_saves_nothing_up(
    gateway, make_engine, make_request, step, card
):
    engine = make_engine()
    for i in range(30):
        await gateway.enqueue(make_request(f"d{i:02}"), card)
    claim_one_by_one(engine, step, 10)
    await gateway.enqueue(make_request("urgent", service_class="priority"), card)
    assert claim_one_by_one(engine, step, 1) == ["urgent"]
    for i in range(20):
        await gateway.enqueue(make_request(f"batch{i:02}", service_class="batch"), card)
    first_ten = claim_one_by_one(engine, step, 10)
    assert 1 <= sum(i.startswith("batch") for i in first_ten) <= 3  # a fifth, not what it did not use before


async def test_a_flood_does_not_delay_another_tenant(gateway, make_engine, make_request, step, row, card):
    engine = make_engine()
    for i in range(200):
        await gateway.enqueue(make_request(f"flood{i:03}", tenant="a"), card)
    for i in range(5):
        running = step(engine, max_requests=4).claimed
        await gateway.enqueue(make_request(f"single{i}", tenant="b"), card)
        ids = [c.request.id for c in step(engine, max_requests=2).claimed]
        assert f"single{i}" in ids, ids
        step(engine, *(row(c, 0, [1] * 8, FinishReason.LENGTH) for c in running))


async def test_shares_are_in_tokens_not_in_requests(gateway, make_engine, make_request, step, card):
    for i in range(60):
        await gateway.enqueue(make_request(f"long{i:02}", tenant="a", prompt=90, max_tokens=30), card)
        await gateway.enqueue(make_request(f"short{i:02}", tenant="b", prompt=10, max_tokens=30), card)
    claimed = claim_one_by_one(make_engine(), step, 40)
    shorts = sum(i.startswith("short") for i in claimed)
    assert 28 <= shorts <= 32, claimed  # 30 of 40 tokens each against 10 of 120: equal token shares


async def test_finish_corrects_the_estimate(server, gateway, make_engine, make_request, step, row, card):
    """A tenant that asked for 1000 tokens and took 10 is not behind one that asked for 10 and took them."""
    engine = make_engine()
    for tenant, max_tokens in (("modest", 10), ("careless", 1000)):
        await gateway.enqueue(make_request(f"{tenant}0", tenant=tenant, max_tokens=max_tokens), card)
    await gateway.enqueue(make_request("other", tenant="other", max_tokens=2000), card)  # keeps the busy period going
    claimed = {c.request.tenant: c for c in step(engine, max_requests=9).claimed}
    step(engine, *(row(claimed[t], 0, [1] * 10, FinishReason.STOP) for t in ("modest", "careless")))
    tags = server.client.hgetall("noria:{demo/model}:finish_tags")
    assert tags[b"default/modest"] == tags[b"default/careless"] == b"14"
    step(engine, row(claimed["other"], 0, [1], FinishReason.STOP))
    assert not server.client.exists("noria:{demo/model}:finish_tags", "noria:{demo/model}:virtual_time")


async def test_put_back_requests_keep_their_place(gateway, make_engine, make_request, step, card):
    first, second = make_engine(), make_engine()
    for i in range(6):
        await gateway.enqueue(make_request(f"r{i}"), card)
    step(first, max_requests=3)
    first.close()
    assert claim_one_by_one(second, step, 6) == [f"r{i}" for i in range(6)]
