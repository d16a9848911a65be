"""Engines die, sleep and go: fencing, resumption, poison, hand-back."""

from __future__ import annotations

import asyncio
import threading

from noria.engine.wire.messages import FinishReason

MODEL = "demo/model"
OWNED = "noria:{demo/model}:owned:"


async def test_a_dead_engines_request_resumes_after_what_was_recorded(
    server, gateway, make_engine, make_request, reader, step, row, card, lapse
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
    lapse(first)
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
    server, gateway, make_engine, make_request, step, row, card, lapse
):
    first, second = make_engine(engine_id="same"), make_engine()
    await gateway.enqueue(make_request("r"), card)
    (past,) = step(first, max_requests=1).claimed
    lapse(first)
    await gateway.reap(MODEL)
    again = make_engine(engine_id="same")
    (present,) = step(again, max_requests=1).claimed
    assert (past.epoch, present.epoch) == (1, 2)
    assert step(first, row(past, 0, [99], FinishReason.STOP)).fenced == []  # it ended itself: nothing to drop …
    assert server.client.hget(OWNED + "same", "r") == b"2 0"  # … and nothing was ended
    assert step(second, row(present, 0, [98])).fenced == []  # never held it, so has nothing to drop
    again.close()
    (next_one,) = step(second, max_requests=1).claimed
    assert (next_one.epoch, next_one.delivered) == (3, [])  # and nothing was recorded


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
    server, gateway, make_engine, make_request, step, row, card, lapse
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
        lapse(engine)
        while not await gateway.reap(MODEL):  # the heartbeat may have renewed in between
            lapse(engine)
        assert await asyncio.to_thread(lost.wait, 2)
        assert step(engine, row(claimed, 1, [2])).lease_lost
        lost.clear()
        assert engine.renew()
    finally:
        stop.set()
        thread.join()


async def test_poison_is_buried_after_two_deaths(
    server, gateway, make_engine, make_request, reader, step, row, card, lapse
):
    request = make_request("poison")
    await gateway.enqueue(request, card)
    killed = []
    for life in (1, 2):
        engine = make_engine()
        (claimed,) = step(engine, max_requests=1).claimed
        assert claimed.epoch == life
        step(engine, row(claimed, life - 1, [life]))
        lapse(engine)
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


async def test_who_was_merely_in_a_batch_with_poison_is_not_condemned(
    server, gateway, make_engine, make_request, reader, step, row, card, lapse
):
    """The engine dies whenever `poison` is computed: it is found out alone, all others are answered."""
    ids = [f"r{i}" for i in range(5)] + ["poison"] + [f"r{i}" for i in range(5, 9)]
    for request_id in ids:
        await gateway.enqueue(make_request(request_id), card)
    lives, engine, running = 1, make_engine(), {}
    for _ in range(60):
        for claimed in step(engine, max_requests=9 - len(running)).claimed:
            running[claimed.request.id] = claimed, sum(len(f.token_ids) for f in claimed.delivered)
        if "poison" in running:
            lapse(engine)
            await gateway.reap(MODEL)
            lives, engine, running = lives + 1, make_engine(), {}
            continue
        rows, going = [], {}
        for request_id, (claimed, seq) in running.items():
            rows.append(row(claimed, seq, [seq], FinishReason.LENGTH if seq == 3 else None))
            if seq < 3:
                going[request_id] = claimed, seq + 1
        step(engine, *rows)
        running = going
    lasts = {f.request_id: f.finish for f in await reader.last_of(*ids)}
    assert lasts.pop("poison") is FinishReason.ERROR
    assert set(lasts.values()) == {FinishReason.LENGTH}
    assert lives == 3
    assert server.client.xlen("noria:{demo/model}:dead") == 1
    assert not [key for key in server.key_names() if "request:" in key or "trials" in key or "suspects" in key]


async def test_one_life_of_an_engine_counts_one_death(server, gateway, make_engine, make_request, step, card, lapse):
    """An engine that is paused again and again, and comes back each time, has died once at most."""
    await gateway.enqueue(make_request("r"), card)
    engine = make_engine()
    for _ in range(4):
        assert [c.request.id for c in step(engine, max_requests=1).claimed] == ["r"]
        lapse(engine)
        assert await gateway.reap(MODEL) == 1
        assert step(engine).lease_lost
    assert server.client.hget("noria:{demo/model}:request:r", "attempts") == b"1"
    assert not server.client.exists("noria:{demo/model}:dead")


async def test_an_engine_tries_one_suspect_at_a_time(gateway, make_engine, make_request, step, row, card, lapse):
    for request_id in ("r1", "r2", "r3"):
        await gateway.enqueue(make_request(request_id), card)
    first, second = make_engine(), make_engine()
    assert len(step(first, max_requests=3).claimed) == 3
    lapse(first)
    assert await gateway.reap(MODEL) == 3
    (tried,) = step(second, max_requests=3).claimed
    assert step(second, max_requests=3).claimed == []  # it has not survived a token yet
    step(second, row(tried, 0, [1]))
    (other,) = step(second, max_requests=3).claimed
    assert (tried.request.id, other.request.id) == ("r1", "r2")
    (last,) = step(second, row(other, 0, [], FinishReason.STOP), max_requests=3).claimed  # its end will do as well
    assert last.request.id == "r3"


async def test_a_long_run_loses_nothing_with_its_engine(server, gateway, make_engine, make_request, step, row, card):
    """The journal is cut back now and then, while requests are folded into their progress by turns."""
    length, ids = 70, [f"r{i:02}" for i in range(40)]
    for request_id in ids:
        await gateway.enqueue(make_request(request_id, max_tokens=1000), card)
    first, second = make_engine(), make_engine()
    claimed = step(first, max_requests=len(ids)).claimed
    for place in range(length):
        step(first, *(row(each, place, [place]) for each in claimed))
    assert server.client.llen("noria:{demo/model}:journal:" + first.engine_id) < length
    first.close()
    resumed = step(second, max_requests=len(ids)).claimed
    assert [each.request.id for each in resumed] == ids
    for each in resumed:
        assert [token for frame in each.delivered for token in frame.token_ids] == list(range(length))


async def test_nobody_passes_a_suspect_that_has_waited_for_too_long(
    server, gateway, make_engine, make_request, step, row, card, lapse
):
    for request_id, prompt in (("large", 100), ("small1", 4), ("small2", 4)):
        await gateway.enqueue(make_request(request_id, prompt=prompt), card)
    first, engine = make_engine(), make_engine(max_passed=0.1)
    assert len(step(first, max_requests=3).claimed) == 3
    lapse(first)
    assert await gateway.reap(MODEL) == 3
    (small,) = step(engine, max_requests=1, max_blocks=3).claimed
    assert small.request.id == "small1"  # the large one may be passed for a while
    step(engine, row(small, 0, [1]))  # and no suspect is on trial now
    await asyncio.sleep(0.15)
    assert step(engine, max_requests=1, max_blocks=3).claimed == []
    (large,) = step(engine, row(small, 1, [2], FinishReason.STOP), max_requests=1, max_blocks=3).claimed
    assert large.request.id == "large"  # the engine has offered all it has


async def test_a_suspect_that_ends_in_the_queue_is_charged_for_what_it_had(
    server, gateway, make_engine, make_request, step, row, card, lapse
):
    await gateway.enqueue(make_request("neighbour"), card)
    other = make_engine()
    step(other, max_requests=1)  # else nothing runs when it has ended, and all accounts are forgotten
    await gateway.enqueue(make_request("r", prompt=4, max_tokens=8), card)
    engine = make_engine()
    (claimed,) = step(engine, max_requests=1).claimed
    step(engine, row(claimed, 0, [1, 2, 3]))
    lapse(engine)
    assert await gateway.reap(MODEL) == 1
    await gateway.cancel(MODEL, "r")
    accounts = server.client.hgetall("noria:{demo/model}:finish_tags")
    assert float(accounts[b"default/default"]) == (4 + 8) + (4 + 3)
    assert float(accounts[b"*/default"]) == ((4 + 8) + (4 + 3)) / 4
