"""Where guesses come from, when they are made, and what the scheduler gives them."""

from __future__ import annotations

import pytest

from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.scheduling.speculation import PAUSE, Drafter


def test_what_followed_the_same_ending_before_is_proposed() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 2, 3]
    assert Drafter().propose(tokens, 9, 3, 1) == (4, 5, 6)
    assert Drafter().propose([1, 2, 3, 4], 4, 3, 1) == ()


def test_the_longest_ending_counts_and_then_the_latest_place() -> None:
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 1, 2, 3]
    assert Drafter().propose(tokens, 15, 1, 1) == (50,)
    assert Drafter().propose([*tokens[:12], 7, 2, 3], 15, 1, 1) == (70,)


def test_a_repetition_is_taken_to_go_on() -> None:
    assert Drafter().propose([5, 6, 7, 5, 6, 7, 5, 6], 8, 7, 1) == (7, 5, 6, 7, 5, 6, 7)


def test_tokens_that_come_later_are_looked_up_too() -> None:
    drafter, tokens = Drafter(), [1, 2]
    assert drafter.propose(tokens, 2, 4, 1) == ()
    tokens += [3, 4, 1, 2]
    assert drafter.propose(tokens, 2, 4, 1) == (3, 4, 1, 2)


def test_a_prediction_is_followed_from_the_start_and_found_again_after_a_detour() -> None:
    drafter, prompt = Drafter([10, 11, 12, 13, 14, 15]), [1, 2, 3]
    assert drafter.propose(prompt, 3, 2, 1) == (10, 11)
    assert drafter.propose([*prompt, 10, 11, 12], 3, 2, 1) == (13, 14)
    assert drafter.propose([*prompt, 10, 11, 12, 99], 3, 2, 1) == ()
    assert drafter.propose([*prompt, 10, 11, 12, 99, 13, 14], 3, 2, 1) == (15,)


def test_what_became_of_a_prediction_is_counted_apart_from_other_guesses() -> None:
    drafter, prompt = Drafter([10, 11, 12, 13]), [1, 2, 3, 1, 2]
    assert drafter.take_predicted() is None
    drafter.propose(prompt, 5, 2, 1)
    drafter.learn(2, 1)
    assert drafter.propose([*prompt, 10, 5, 1, 2], 5, 2, 1) == (10, 5), "its own text"
    drafter.learn(2, 2)
    assert drafter.take_predicted() == (1, 1)
    assert drafter.take_predicted() is None


def test_guessing_stops_where_it_does_not_pay_and_is_tried_again_later() -> None:
    drafter, tokens = Drafter(), [1, 2, 3] * 5
    rounds = 0
    while drafter.propose(tokens, 3, 6, 4):
        drafter.learn(6, 0)
        rounds += 1
    assert 1 < rounds < 6
    assert drafter.propose([1, 2, 3] * ((15 + PAUSE) // 3 - 1), 3, 6, 4) == ()
    assert drafter.propose([1, 2, 3] * (6 + PAUSE // 3), 3, 6, 4) != ()


def test_what_pays_alone_does_not_pay_in_a_crowd() -> None:
    tokens = [1, 2, 3] * 5
    assert Drafter().propose(tokens, 3, 6, 1) and Drafter().propose(tokens, 3, 6, 15)
    assert not Drafter().propose(tokens, 3, 6, 40)
    sure = Drafter()
    for _ in range(20):
        sure.learn(6, 6)
    assert sure.propose(tokens, 3, 6, 40)


def scheduler_of(policy: str = "paged", *, num_blocks: int = 64, batch: int = 4, tokens: int = 64) -> Scheduler:
    kv = KVBlocks(num_blocks, 4, prefix_cache=policy == "paged")
    return Scheduler(
        POLICIES[policy], kv, max_batch_size=batch, max_batch_tokens=tokens, max_model_len=1000, max_draft=5
    )


def looping(name: str, max_tokens: int, *, first: int = 0) -> Request:
    return Request(name, [first, first + 1, first + 2] * 4, 12, max_tokens)


def step(scheduler: Scheduler, num_right: int = 99) -> list[tuple[int, int]]:
    """One iteration in which `num_right` guesses are right; (start, guesses) of each row."""
    batch = scheduler.select()
    assert batch is not None
    sampled = []
    for row in batch.rows:
        right = row.draft[:num_right]
        sampled.append([*right, row.request.tokens[(row.request.num_tokens + len(right)) % 3]] if row.samples else [])
    scheduler.complete(batch, sampled)
    scheduler.check()
    return [(row.start, len(row.draft)) for row in batch.rows]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_right_guesses_count_as_computed_and_wrong_ones_are_computed_again(policy: str) -> None:
    scheduler = scheduler_of(policy)
    scheduler.add(looping("a", 20))
    assert step(scheduler) == [(0, 0)]
    assert step(scheduler, 2) == [(12, 5)]
    assert step(scheduler) == [(15, 5)]
    assert step(scheduler, 0) == [(21, 5)]
    assert step(scheduler) == [(22, 5)]
    assert step(scheduler) == [(28, 2)], "guesses stop where the request ends"
    assert len(scheduler) == 0
    assert (scheduler.speculation.drafted, scheduler.speculation.accepted) == (22, 14)


def test_an_end_among_the_guesses_ends_the_request_there() -> None:
    scheduler = scheduler_of()
    request = looping("a", 20)
    request.stop_ids = frozenset({2})
    scheduler.add(request)
    step(scheduler)
    step(scheduler)
    assert request.finish == "stop" and request.tokens[12:] == [0, 1, 2]


def test_guesses_leave_a_token_for_everybody_and_take_nobodys_blocks() -> None:
    scheduler = scheduler_of(tokens=8)
    for index in range(3):
        scheduler.add(looping("abc"[index], 40, first=10 * index))
    while not all(request.num_output for request in scheduler.running) or scheduler.waiting:
        step(scheduler, 0)
    assert sum(1 + num_guesses for _, num_guesses in step(scheduler)) <= 8
    for num_blocks, num_guesses in ((6, 5), (5, 3)):  # one block is left for others to be admitted
        tight = scheduler_of(num_blocks=num_blocks)
        tight.add(looping("a", 8))
        step(tight)
        assert step(tight) == [(12, num_guesses)]
    tight = scheduler_of(num_blocks=8)
    tight.add(looping("a", 8))
    tight.add(looping("b", 8, first=10))
    step(tight)
    assert step(tight) == [(12, 3), (12, 3)], "as far as the blocks go that they have"
    assert tight.preemptions.total == 0
