"""The three policies on small examples that can be followed by hand, and the states that once were traps.

The model here says its own position; what matters is who steps when.
"""

from __future__ import annotations

import pytest

from noria.engine.scheduling.batch import Batch
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.preemption import Room
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import CannotEverFit, Scheduler
from tests.engine.scheduling.by_hand import finish, request_of, run, scheduler_of, step

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


def prompt_tokens_beside(num_streams: int, num_prompts: int) -> int:
    """Prompt tokens, in chunks of 3, of an iteration that so many streams are in while so many prompts are read."""
    scheduler = scheduler_of("paged", tokens=40, num_blocks=200, batch=8, chunk=3)
    for number in range(num_streams):
        scheduler.add(request_of(f"stream{number}", prompt=2, max_tokens=9))
    if num_streams:
        batch = scheduler.select()
        assert batch is not None
        finish(scheduler, batch)
    for number in range(num_prompts):
        scheduler.add(request_of(f"prompt{number}", prompt=30, max_tokens=9, first=100 * (1 + number)))
    batch = scheduler.select()
    assert batch is not None and batch.num_decode_rows == num_streams
    return batch.num_tokens - num_streams


def test_chunks_are_short_where_somebody_would_wait_for_them() -> None:
    assert prompt_tokens_beside(0, 2) == 40
    assert prompt_tokens_beside(2, 1) == 3
    assert prompt_tokens_beside(4, 2) == 3


def test_chunks_grow_where_more_rows_stand_idle_than_stream() -> None:
    assert prompt_tokens_beside(4, 3) == 3 * 6 // 4
    assert prompt_tokens_beside(2, 4) == 3 * 8 // 2
    assert prompt_tokens_beside(2, 40) == 3 * 12 // 2  # six rows are free, however many wait
    assert prompt_tokens_beside(1, 7) == 39  # and never more than an iteration holds


def test_few_requests_are_shared_out_among_the_stages() -> None:
    """Eight that decode make two batches of four, not one of eight and an idle stage; the paper's policy takes all."""
    for policy, expected in (("paged", [4, 4]), ("orca", [8])):
        scheduler = Scheduler(
            POLICIES[policy],
            KVBlocks(64, 16, False),
            max_batch_size=16,
            max_batch_tokens=64,
            max_model_len=64,
            num_stages=2,
        )
        for number in range(8):
            scheduler.add(Request(f"r{number}", [1, 2, 3], 3, max_tokens=9))
        for _ in range(3):
            out = []
            while (batch := scheduler.select()) is not None:
                out.append(batch)
            assert [len(batch.rows) for batch in out] == expected
            for batch in out:
                scheduler.complete(batch, [(7,)] * len(batch.rows))
