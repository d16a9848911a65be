"""Who gives way to whom, and the bounds that keep it from thrashing and starving."""

from __future__ import annotations

import pytest

from noria.engine.scheduling.preemption import MAX_PASSED_OVER, MAX_PREEMPTIONS
from noria.engine.scheduling.request import HOLE
from noria.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.by_hand import finish, request_of, run, scheduler_of, step


def running_of(scheduler: Scheduler) -> str:
    return " ".join(request.id for request in scheduler.running)


def test_a_higher_class_takes_a_slot_from_the_lowest_and_latest() -> None:
    scheduler = scheduler_of("paged", batch=3, cache=True)
    requests = [
        request_of(name, 8, 8, rank=rank, first=100 * n)
        for n, (name, rank) in enumerate((("a", 2), ("b", 3), ("c", 3)))
    ]
    for request in requests:
        scheduler.add(request)
    for _ in range(3):
        step(scheduler)
    assert [room.requests for room in scheduler.rooms(4)] == [3, 3, 2, 0]
    scheduler.add(request_of("urgent", 4, 2, rank=0, first=500))
    assert step(scheduler) == ("a b urgent", "")
    assert scheduler.preemptions.urgency == 1 and scheduler.preemptions.memory == 0
    assert running_of(scheduler) == "urgent a b" and [r.id for r in scheduler.waiting] == ["c"]
    assert [room.requests for room in scheduler.rooms(4)] == [2, 2, 1, 0], "`c` waits: its class is not claimed"
    assert run(scheduler) == ["urgent", "a", "b", "c"]
    assert all(request.num_output == 8 for request in requests)
    assert 0 < scheduler.preemptions.recomputed < 4, "the rest was found in the prefix cache"


def test_room_counts_those_who_are_just_computing() -> None:
    scheduler = scheduler_of("paged", batch=2)
    scheduler.add(request_of("a", rank=3))
    scheduler.add(request_of("b", rank=3, first=50))
    step(scheduler)
    before = scheduler.rooms(4)
    batch = scheduler.select()
    assert batch is not None and scheduler.is_full and before[0].requests == 2
    assert [room.requests for room in scheduler.rooms(4)] == [2, 2, 2, 0]


def test_a_higher_class_takes_blocks_and_only_as_many_requests_as_it_needs() -> None:
    scheduler = scheduler_of("paged", num_blocks=12, batch=8)
    for name in "abc":
        scheduler.add(request_of(name, 12, 4, rank=3))
    step(scheduler)
    assert [room.blocks for room in scheduler.rooms(4)] == [8, 8, 8, 0]
    scheduler.add(request_of("urgent", 13, 1, rank=1))
    assert step(scheduler) == ("a b urgent", "urgent")
    assert scheduler.preemptions.urgency == 1


def test_nobody_gives_way_in_vain() -> None:
    scheduler = scheduler_of("paged", num_blocks=12, batch=8)
    scheduler.add(request_of("equal", 24, 8, rank=0))
    scheduler.add(request_of("low", 12, 4, rank=3))
    step(scheduler)
    scheduler.add(request_of("urgent", 28, 1, rank=0))
    step(scheduler)
    assert running_of(scheduler) == "equal low" and not scheduler.preemptions.total


def test_equal_classes_and_the_papers_policies_do_not_give_way() -> None:
    for policy, rank in (("paged", 1), ("orca", 3), ("static", 3)):
        scheduler = scheduler_of(policy, batch=1)
        scheduler.add(request_of("first", rank=rank))
        step(scheduler)
        scheduler.add(request_of("second", rank=1))
        assert run(scheduler) == ["first", "second"], policy


def test_one_that_has_given_way_often_enough_is_left_alone_and_ends() -> None:
    scheduler = scheduler_of("paged", batch=1)
    low = request_of("low", 4, 60, rank=3)
    scheduler.add(low)
    for n in range(3 * MAX_PREEMPTIONS):
        step(scheduler)
        step(scheduler)
        scheduler.add(request_of(f"urgent{n}", 4, 1, rank=0))
    assert low.num_preemptions == MAX_PREEMPTIONS == scheduler.preemptions.urgency
    assert len(low.blocks) == 16, "it holds blocks for its whole output"
    assert run(scheduler)[0] == "low"


def test_one_that_waits_is_passed_over_a_bounded_number_of_times() -> None:
    scheduler = scheduler_of("paged", batch=1)
    scheduler.add(request_of("low", 4, 60, rank=3))
    step(scheduler)
    passed = 0
    while scheduler.rooms(4)[0].requests:
        scheduler.add(request_of(f"urgent{passed}", 4, 1, rank=0))
        passed += 1
        step(scheduler)
        assert passed <= MAX_PASSED_OVER
    assert passed == MAX_PASSED_OVER
    assert step(scheduler) == ("low", "")


def test_a_preempted_request_comes_back_only_with_room_for_everybody_to_grow() -> None:
    scheduler = scheduler_of("paged", num_blocks=9, batch=4)
    for name in "abc":
        scheduler.add(request_of(name, 11, 13))
    free = []
    while len(scheduler):
        waiting = {r.id for r in scheduler.waiting if r.num_preemptions}
        num_running = len(scheduler.running)
        batch = scheduler.select()
        assert batch is not None
        back = [r for r in scheduler.running if r.id in waiting]
        if back and num_running:
            free.append(scheduler.kv.num_free)
            assert scheduler.kv.num_free >= 1 + num_running
        finish(scheduler, batch)
    assert scheduler.preemptions.memory <= 3


@pytest.mark.parametrize("protected", [False, True])
def test_with_windows_who_is_preempted_no_more_shares_no_blocks(protected: bool) -> None:
    """What it lets go of must be free for what it goes on with."""
    scheduler = scheduler_of("paged", num_blocks=32, cache=True, tokens=8, windows=(14,))
    first, second = request_of("a", 16, 40), request_of("b", 16, 4)
    first.num_preemptions = MAX_PREEMPTIONS * protected
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    shared = 0
    while len(scheduler) > 1:
        step(scheduler)
        shared = max(shared, *(scheduler.kv.num_holding(block) for block in first.blocks if block != HOLE))
    assert shared == (1 if protected else 2)
    assert (second.num_cached > 0) == (not protected)
