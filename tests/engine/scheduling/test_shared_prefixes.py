"""Requests that arrive together share the blocks that one of them is just computing."""

from __future__ import annotations

from tests.engine.scheduling.by_hand import request_of, run, scheduler_of, step


def test_eight_choices_share_the_blocks_of_their_prompt() -> None:
    used = {}
    for cache in (False, True):
        scheduler = scheduler_of("paged", num_blocks=128, batch=8, tokens=512, cache=cache)
        for n in range(8):
            scheduler.add(request_of(f"choice{n}", 42, 6))
        while scheduler.waiting or not all(r.num_output for r in scheduler.running):
            step(scheduler)
        used[cache] = scheduler.kv.num_held
        assert len(run(scheduler)) == 8
    assert used == {False: 8 * 11, True: 10 + 8}


def test_who_waits_for_a_prefix_lets_others_pass() -> None:
    scheduler = scheduler_of("paged", tokens=25, cache=True)
    scheduler.add(request_of("reader", 21, 4))
    scheduler.add(request_of("sharer", 22, 4))
    scheduler.add(request_of("other", 4, 4, first=50))
    assert step(scheduler)[0] == "reader other"
    assert step(scheduler)[0] == "reader other sharer"
    sharer = scheduler.get("sharer")
    assert sharer is not None and sharer.num_cached == 20
    run(scheduler)


def test_who_waits_for_a_prefix_goes_on_when_its_reader_goes() -> None:
    scheduler = scheduler_of("paged", tokens=8, cache=True)
    scheduler.add(request_of("reader", 21, 2))
    scheduler.add(request_of("sharer", 22, 2))
    assert step(scheduler)[0] == "reader"
    scheduler.cancel("reader")
    assert step(scheduler)[0] == "sharer"
    sharer = scheduler.get("sharer")
    assert sharer is not None and sharer.num_cached == 8
    assert run(scheduler) == ["sharer"]


def test_an_urgent_request_waits_for_no_reader_behind_it() -> None:
    scheduler = scheduler_of("paged", tokens=8, cache=True)
    scheduler.add(request_of("reader", 21, 2, rank=3))
    step(scheduler)
    scheduler.add(request_of("urgent", 21, 2, rank=0))
    assert step(scheduler)[0] == "urgent"
