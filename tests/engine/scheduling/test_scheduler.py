"""The three policies on small examples that can be followed by hand, and the states that once were traps.

The model here says its own position; what matters is who steps when.
"""

from __future__ import annotations

import pytest

from noria.engine.scheduling.batch import Batch, Progress
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.preemption import MAX_PASSED_OVER, MAX_PREEMPTIONS, Room
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import CannotEverFit, Scheduler


def scheduler_of(
    policy: str,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    batch: int = 4,
    tokens: int = 64,
    chunk: int = 0,
    cache: bool = False,
    stages: int = 1,
) -> Scheduler:
    kv = KVBlocks(num_blocks, block_size, prefix_cache=cache)
    return Scheduler(
        POLICIES[policy],
        kv,
        max_batch_size=batch,
        max_batch_tokens=tokens,
        max_chunk_tokens=chunk,
        max_model_len=1000,
        num_stages=stages,
    )


def request_of(name: str, prompt: int = 4, max_tokens: int = 4, *, rank: int = 1, first: int = 0) -> Request:
    return Request(name, list(range(first, first + prompt)), prompt, max_tokens, class_rank=rank)


def finish(scheduler: Scheduler, batch: Batch) -> list[Progress]:
    progress = scheduler.complete(batch, [[row.request.num_tokens] if row.samples else [] for row in batch.rows])
    scheduler.check()
    return progress


def step(scheduler: Scheduler) -> tuple[str, str]:
    """One iteration: names of the rows (padding in brackets), names of those that end."""
    batch = scheduler.select()
    assert batch is not None
    rows = " ".join(f"[{row.request.id}]" if row.is_padding else row.request.id for row in batch.rows)
    return rows, " ".join(p.request.id for p in finish(scheduler, batch) if p.finish is not None)


def run(scheduler: Scheduler) -> list[str]:
    """Iterate until everybody has ended; the names in the order of their ends."""
    ended: list[str] = []
    for _ in range(1000):
        if not len(scheduler):
            assert scheduler.kv.num_free == scheduler.kv.num_blocks
            return ended
        ended.extend(step(scheduler)[1].split())
    raise AssertionError(f"{scheduler.running} and {scheduler.waiting} never end")


# --- the paper's example: a late short request --------------------------------------------------------------------


def test_orca_lets_a_late_short_request_in_and_out() -> None:
    scheduler = scheduler_of("orca")
    scheduler.add(request_of("long", max_tokens=6))
    assert step(scheduler) == ("long", "")
    scheduler.add(request_of("short", max_tokens=2))
    assert step(scheduler) == ("long short", "")
    assert step(scheduler) == ("long short", "short")
    assert [step(scheduler) for _ in range(3)] == [("long", ""), ("long", ""), ("long", "long")]


def test_static_makes_it_wait_and_pads_with_the_finished() -> None:
    scheduler = scheduler_of("static")
    scheduler.add(request_of("long", max_tokens=4))
    scheduler.add(request_of("short", max_tokens=1))
    assert step(scheduler) == ("long short", "")
    scheduler.add(request_of("late", max_tokens=1))
    assert step(scheduler) == ("long [short]", "")
    assert step(scheduler) == ("long [short]", "")
    assert step(scheduler) == ("long [short]", "long short")
    assert step(scheduler) == ("late", "late")


def test_paged_cuts_a_long_prompt_and_decodes_first() -> None:
    scheduler = scheduler_of("paged", tokens=8)
    scheduler.add(request_of("talking", prompt=4, max_tokens=9))
    step(scheduler)
    scheduler.add(request_of("reading", prompt=20, max_tokens=1))
    chunks = []
    while scheduler.get("reading"):
        batch = scheduler.select()
        assert batch is not None and batch.rows[0].request.id == "talking"
        chunks.append((batch.rows[1].start, batch.rows[1].num_tokens, batch.rows[1].samples))
        finish(scheduler, batch)
    assert chunks == [(0, 7, False), (7, 7, False), (14, 6, True)]


def test_chunks_are_short_where_somebody_would_wait_for_them() -> None:
    scheduler = scheduler_of("paged", tokens=20, chunk=3)
    scheduler.add(request_of("alone", prompt=30, max_tokens=2))
    widths = []
    for late in (None, "late", "later", None):
        if late:
            scheduler.add(request_of(late, prompt=5, max_tokens=1, first=100))
        batch = scheduler.select()
        assert batch is not None
        widths.append([(row.request.id, row.num_tokens) for row in batch.rows])
        finish(scheduler, batch)
    assert widths == [
        [("alone", 20)],
        [("alone", 10), ("late", 5)],
        [("alone", 1), ("later", 3)],
        [("later", 2)],
    ]


def test_orca_reserves_for_the_whole_output_and_paged_does_not() -> None:
    for policy, together in (("orca", 1), ("paged", 3)):
        scheduler = scheduler_of(policy, num_blocks=8)
        for name in "abc":
            scheduler.add(request_of(name, prompt=4, max_tokens=16))
        scheduler.select()
        assert len(scheduler.running) == together, policy


def test_orca_stops_at_the_first_that_does_not_fit() -> None:
    scheduler = scheduler_of("orca", num_blocks=8)
    scheduler.add(request_of("a", max_tokens=12))
    scheduler.add(request_of("big", max_tokens=28))
    scheduler.add(request_of("small", max_tokens=1))
    assert step(scheduler)[0] == "a"
    assert run(scheduler) == ["a", "big", "small"]


def test_urgent_classes_enter_first() -> None:
    scheduler = scheduler_of("orca", batch=1)
    for name, rank in (("flex", 2), ("first", 1), ("second", 1), ("priority", 0)):
        scheduler.add(request_of(name, rank=rank))
    assert run(scheduler) == ["priority", "first", "second", "flex"]


def test_preemption_takes_the_last_and_brings_it_back() -> None:
    scheduler = scheduler_of("paged", num_blocks=6)
    for name in "ab":
        scheduler.add(request_of(name, prompt=7, max_tokens=12))
    victims = {name: request for name in "ab" if (request := scheduler.get(name))}
    assert run(scheduler) == ["a", "b"]
    assert victims["a"].num_preemptions == 0 and victims["b"].num_preemptions >= 1
    assert victims["b"].num_output == 12 and scheduler.preemptions.memory == victims["b"].num_preemptions


def test_a_preempted_request_returns_to_its_own_cached_blocks() -> None:
    scheduler = scheduler_of("paged", num_blocks=8, cache=True)
    scheduler.add(request_of("a", prompt=7, max_tokens=16))
    scheduler.add(request_of("b", prompt=7, max_tokens=16, first=100))
    victim = scheduler.get("b")
    assert victim is not None
    starts = []
    while len(scheduler):
        batch = scheduler.select()
        assert batch is not None
        starts += [row.start for row in batch.rows if row.request is victim and not row.is_decode]
        finish(scheduler, batch)
    assert starts[0] == 0 and len(starts) > 1 and starts[1] > 0
    assert victim.num_cached == 0, "what it left there itself is no hit of the client's prompt"


# --- classes ------------------------------------------------------------------------------------------------------


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


# --- prefixes that are just being computed ------------------------------------------------------------------------


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


# --- room ---------------------------------------------------------------------------------------------------------


def test_an_idle_engine_offers_its_whole_pool_and_keeps_its_word() -> None:
    for policy in POLICIES:
        scheduler = scheduler_of(policy, num_blocks=8)
        assert scheduler.room() == Room(4, 8)
        max_tokens = 1 if policy == "paged" else 4
        for name in "ab":  # four blocks each, together the pool
            scheduler.add(request_of(name, prompt=15 if policy == "paged" else 12, max_tokens=max_tokens))
        scheduler.select()
        assert not scheduler.waiting, policy


def test_a_request_as_large_as_the_pool_runs() -> None:
    for policy in POLICIES:
        scheduler = scheduler_of(policy, num_blocks=4)
        scheduler.add(request_of("all", prompt=15, max_tokens=1))
        scheduler.add(request_of("none", prompt=16, max_tokens=0))
        assert run(scheduler) == ["all", "none"], policy


def test_no_room_while_somebody_waits_or_the_batch_is_closed() -> None:
    scheduler = scheduler_of("static")
    scheduler.add(request_of("a"))
    assert scheduler.room() == Room(0, 0)
    step(scheduler)
    assert scheduler.room() == Room(0, 0)
    run(scheduler)
    assert scheduler.room() == Room(4, 64)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [(990, 11, "1001 tokens asked for, the context holds 1000"), (200, 57, "257 .* the KV memory holds 256")],
)
def test_what_can_never_fit_is_refused(prompt: int, max_tokens: int, message: str) -> None:
    for policy in POLICIES:
        with pytest.raises(CannotEverFit, match=message):
            scheduler_of(policy).add(request_of("huge", prompt, max_tokens))


def test_nonsense_is_refused_before_it_can_block_the_queue() -> None:
    scheduler = scheduler_of("paged")
    with pytest.raises(ValueError, match="no prompt"):
        scheduler.add(Request("empty", [], 0, 5))
    with pytest.raises(ValueError, match="more output"):
        scheduler.add(Request("over", [1, 2, 3], 1, 1))
    scheduler.add(request_of("a"))
    with pytest.raises(ValueError, match="already here"):
        scheduler.add(request_of("a"))
    assert run(scheduler) == ["a"]


# --- ends ---------------------------------------------------------------------------------------------------------


def test_cancel_in_each_state() -> None:
    scheduler = scheduler_of("paged", batch=1)
    scheduler.add(request_of("running"))
    scheduler.add(request_of("waiting"))
    step(scheduler)
    told = scheduler.cancel("waiting", "expired")
    assert told is not None and told.finish == "expired"
    batch = scheduler.select()
    assert batch is not None and scheduler.cancel("running") is None, "in flight: it ends at complete"
    (progress,) = finish(scheduler, batch)
    assert (progress.finish, progress.new_tokens) == ("cancelled", ())
    assert scheduler.cancel("running") is None and scheduler.cancel("unknown") is None
    assert len(scheduler) == 0 and scheduler.kv.num_free == 64


def test_a_static_batch_whose_last_live_member_is_cancelled_still_ends() -> None:
    scheduler = scheduler_of("static")
    scheduler.add(request_of("done", max_tokens=1))
    scheduler.add(request_of("live", max_tokens=50))
    step(scheduler)
    told = scheduler.cancel("live")
    assert told is not None and told.finish == "cancelled"
    assert step(scheduler) == ("[done]", "done")
    assert run(scheduler) == []


def test_finished_rows_of_a_static_batch_never_crowd_out_the_living() -> None:
    scheduler = scheduler_of("static", batch=4, tokens=2)
    for name, max_tokens in (("a", 1), ("b", 1), ("c", 3), ("d", 3)):
        scheduler.add(request_of(name, max_tokens=max_tokens))
    assert sorted(run(scheduler)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_resumed_request_goes_on_where_it_was(policy: str) -> None:
    scheduler = scheduler_of(policy, tokens=5)
    resumed = request_of("r", prompt=6, max_tokens=4)
    resumed.tokens += [70, 71]
    scheduler.add(resumed)
    run(scheduler)
    assert resumed.num_output == 4 and resumed.finish == "length"


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_resumed_request_that_had_all_its_tokens_samples_no_more(policy: str) -> None:
    scheduler = scheduler_of(policy)
    resumed = request_of("r", prompt=6, max_tokens=2)
    resumed.tokens += [70, 71]
    scheduler.add(resumed)
    assert run(scheduler) == ["r"] and resumed.num_output == 2 and resumed.finish == "length"


def test_cached_tokens_are_prompt_tokens() -> None:
    scheduler = scheduler_of("paged", cache=True)
    scheduler.add(request_of("first", prompt=5, max_tokens=8))
    run(scheduler)
    resumed = request_of("again", prompt=5, max_tokens=8)
    resumed.tokens += [5, 6, 7, 8, 9, 10]
    scheduler.add(resumed)
    step(scheduler)
    assert resumed.num_cached == 5


def test_a_failed_plan_is_taken_back_and_tried_row_by_row() -> None:
    scheduler = scheduler_of("orca")
    for name in "ab":
        scheduler.add(request_of(name, max_tokens=2))
    batch = scheduler.select()
    assert batch is not None
    scheduler.abandon(batch)
    finish(scheduler, scheduler.only(batch.rows[0]))
    scheduler.abandon(scheduler.only(batch.rows[1]))
    told = scheduler.cancel("b", "error")
    assert told is not None and told.finish == "error"
    assert run(scheduler) == ["a"]


# --- several plans out at once ------------------------------------------------------------------------------------


def test_each_pipeline_stage_gets_a_batch() -> None:
    scheduler = scheduler_of("orca", batch=2, stages=2)
    for name in "abcde":
        scheduler.add(request_of(name, max_tokens=2))
    first, second = scheduler.select(), scheduler.select()
    assert first is not None and [row.request.id for row in first.rows] == ["a", "b"]
    assert second is not None and [row.request.id for row in second.rows] == ["c", "d"]
    assert scheduler.select() is None
    finish(scheduler, first)
    third = scheduler.select()
    assert third is not None and [row.request.id for row in third.rows] == ["a", "b"]


def test_an_earlier_request_waits_for_a_later_one_in_flight_and_keeps_its_blocks() -> None:
    scheduler = scheduler_of("paged", num_blocks=5, batch=1, stages=2)
    early, late = request_of("early", prompt=6, max_tokens=9), request_of("late", prompt=7, max_tokens=9)
    scheduler.add(early)
    scheduler.add(late)
    plans: list[Batch] = []
    ended: list[str] = []
    while len(scheduler):
        while len(plans) < 2 and (batch := scheduler.select()) is not None:
            scheduler.check()
            plans.append(batch)
        ended += [p.request.id for p in finish(scheduler, plans.pop(0)) if p.finish is not None]
    assert ended == ["early", "late"]
    assert early.num_preemptions == 0 and late.num_preemptions >= 1
