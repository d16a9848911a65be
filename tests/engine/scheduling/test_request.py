"""When a request ends on a token, and what its counts say. Knows no scheduler."""

from __future__ import annotations

import pytest

from noria.engine.scheduling.request import Request


def request_of(output: list[int], *, max_tokens: int = 4, min_tokens: int = 0) -> Request:
    return Request("r", [7, 7, 7, *output], 3, max_tokens, stop_ids=frozenset({9}), min_tokens=min_tokens)


@pytest.mark.parametrize(
    ("output", "min_tokens", "max_model_len", "finish"),
    [
        ([1], 0, 100, None),
        ([9], 0, 100, "stop"),
        ([1, 9], 2, 100, None),  # a stop token among the first `min_tokens` does not end it
        ([1, 1, 9], 2, 100, "stop"),
        ([1, 1, 1, 1], 0, 100, "length"),
        ([1, 1, 1, 9], 0, 100, "stop"),  # the reason that says more, where both hold
        ([1, 1, 1, 9], 4, 100, "length"),
        ([1, 1], 0, 5, "length"),  # the context is full
    ],
)
def test_the_newest_token_may_end_it(
    output: list[int], min_tokens: int, max_model_len: int, finish: str | None
) -> None:
    request = request_of(output[:-1], min_tokens=min_tokens)
    assert request.extend(output[-1:], max_model_len) == (tuple(output[-1:]), finish)
    assert request.tokens[3:] == output


def test_what_was_sampled_beyond_the_end_is_dropped() -> None:
    request = request_of([1])
    assert request.extend([1, 9, 1], 100) == ((1, 9), "stop")
    assert request.tokens[3:] == [1, 1, 9]
    assert request_of([1]).extend([1, 1, 1, 1], 100) == ((1, 1, 1), "length")


def test_counts_replace_phases() -> None:
    request = request_of([])
    assert (request.num_pending, request.is_decoding, request.wants_more) == (3, False, True)
    request.num_computed = 2
    assert (request.num_pending, request.is_decoding) == (1, False)  # the last token of a prompt is still prompt
    request.num_computed = 3
    request.tokens.append(1)
    assert (request.num_pending, request.is_decoding, request.num_output) == (1, True, 1)
    request.tokens.extend([1, 1, 1])
    assert not request.wants_more and request.num_tokens == request.num_total
