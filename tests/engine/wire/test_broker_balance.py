"""Which of several engines takes what waits: the one that holds least, and for no longer than a moment nobody else."""

from __future__ import annotations

import time
from collections import Counter

import pytest

MAX_LEFT = 0.1
POOL = "noria:{demo/model}:"


def ids(outcome) -> list[str]:
    return [claimed.request.id for claimed in outcome.claimed]


@pytest.fixture
def enqueue(gateway, make_request, card):
    async def enqueue(*request_ids: str, **fields: object) -> None:
        for request_id in request_ids:
            await gateway.enqueue(make_request(request_id, **fields), card)

    return enqueue


@pytest.fixture
def pair(make_engine, step):
    """Two engines that have said what room they have: 64 slots each, for any bound on waiting that is not tested."""
    engines = [make_engine(max_left=60.0) for _ in range(2)]
    for engine in engines:
        step(engine, max_requests=64)
    return engines


@pytest.mark.parametrize("number", [2, 12, 13, 64])
async def test_a_burst_is_shared(number, enqueue, pair, step):
    await enqueue(*(f"r{i}" for i in range(number)))
    shares = [len(ids(step(engine, max_requests=64))) for engine in pair]
    assert shares == [number - number // 2, number // 2]


async def test_whoever_holds_less_catches_up_first(enqueue, pair, step):
    first, second = pair
    await enqueue(*(f"r{i}" for i in range(4)))
    assert len(ids(step(first, max_requests=3))) == 2
    assert len(ids(step(second, max_requests=1))) == 1  # it has room for one: the last is left for who has more
    assert ids(step(first, max_requests=62)) == ["r3"]
    step(second, max_requests=1)  # it has room again
    await enqueue("next")
    assert not ids(step(first, max_requests=61))
    assert ids(step(second, max_requests=1)) == ["next"]


async def test_three_engines_and_a_crowd_fill_up_evenly(enqueue, make_engine, step):
    engines = [make_engine(max_left=60.0) for _ in range(3)]
    rooms = dict(zip(engines, (4, 16, 16), strict=True))
    for engine, room in rooms.items():
        step(engine, max_requests=room)
    await enqueue(*(f"r{i}" for i in range(24)))
    shares: Counter[int] = Counter()
    for _ in range(2):
        for i, (engine, room) in enumerate(rooms.items()):
            shares[i] += len(ids(step(engine, max_requests=room - shares[i])))
    assert shares == {0: 4, 1: 10, 2: 10}


async def test_nothing_is_left_to_who_has_no_room(enqueue, pair, step, make_engine):
    """Full, draining, without blocks, gone, or never heard of: each would be waited for in vain."""
    first, second = pair
    make_engine()
    await enqueue("a", "b")
    assert ids(step(first, max_requests=64)) == ["a"]
    step(second, max_requests=0)
    assert ids(step(first, max_requests=63)) == ["b"]
    step(second, max_requests=64, max_blocks=2)
    await enqueue("long", prompt=100)
    assert ids(step(first, max_requests=62)) == ["long"]
    step(second, max_requests=64)
    second.close()
    await enqueue("c")
    assert ids(step(first, max_requests=61)) == ["c"]


async def test_one_whose_lease_ran_out_is_not_waited_for(enqueue, pair, step, lapse):
    first, second = pair
    await enqueue("a", "b")
    lapse(second)
    assert ids(step(first, max_requests=64)) == ["a", "b"]


async def test_a_silent_engine_costs_a_moment(enqueue, make_engine, step):
    first, silent = make_engine(max_left=MAX_LEFT), make_engine()
    for engine in (first, silent):
        step(engine, max_requests=64)
    await enqueue(*(f"r{i}" for i in range(6)))
    begun = time.monotonic()
    taken = ids(step(first, max_requests=64))
    while len(taken) < 6:
        taken += ids(step(first, max_requests=64 - len(taken)))
        assert time.monotonic() < begun + MAX_LEFT + 1.5
    assert time.monotonic() - begun > MAX_LEFT / 2
    assert taken == [f"r{i}" for i in range(6)]


async def test_what_is_left_wakes_an_idle_engine(server, enqueue, pair, step):
    first, second = pair
    await enqueue("a")
    step(first, max_requests=64)
    await enqueue("b")
    server.client.delete(POOL + "bell")
    step(first, max_requests=63)
    begun = time.monotonic()
    second.wait(1.0)
    assert time.monotonic() - begun < 0.5
    assert ids(step(second, max_requests=64)) == ["b"]


async def test_nobody_gives_way_here_while_there_is_a_place_elsewhere(enqueue, pair, step):
    first, second = pair
    await enqueue("a", "b")
    step(first, max_requests=1)
    step(second, max_requests=1)
    await enqueue("c")
    step(second, max_requests=64)  # it holds two now, the first one: but there somebody would have to give way
    await enqueue("urgent", service_class="priority")
    assert not step(first, max_requests=[1, 1, 1, 0]).claimed
    assert ids(step(second, max_requests=[62, 62, 62, 62])) == ["urgent"]


async def test_what_a_dead_engine_held_is_shared_too(enqueue, make_engine, step):
    dying, *others = [make_engine(max_left=MAX_LEFT) for _ in range(3)]
    await enqueue(*(f"r{i}" for i in range(8)))
    step(dying, max_requests=64)
    time.sleep(1.5 * MAX_LEFT)
    for engine in others:
        step(engine, max_requests=64)
    dying.close()
    assert [len(ids(step(engine, max_requests=64))) for engine in others] == [4, 4]


async def test_turns_are_kept_whoever_takes(enqueue, pair, step):
    """Two tenants with equal shares of the tokens, one with requests three times as long, whoever takes them."""
    for i in range(12):
        await enqueue(f"long{i:02}", tenant="a", prompt=90, max_tokens=30)
        await enqueue(f"short{i:02}", tenant="b", prompt=10, max_tokens=30)
    taken, held = [], [0, 0]
    while len(taken) < 16:
        for i, engine in enumerate(pair):
            claimed = ids(step(engine, max_requests=1))
            held[i] += len(claimed)
            taken += claimed
    assert 11 <= sum(i.startswith("short") for i in taken) <= 13
    assert held == [8, 8]
