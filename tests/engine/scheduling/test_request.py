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
def test_finish_after(output: list[int], min_tokens: int, max_model_len: int, finish: str | None) -> None:
    request = request_of(output, min_tokens=min_tokens)
    assert request.finish_after(output[-1], max_model_len) == finish


def test_a_prompt_is_no_output_even_if_it_ends_in_a_stop_token() -> None:
    request = Request("r", [7, 9], 2, 0, stop_ids=frozenset({9}))
    assert request.finish_after(9, 100) == "length"


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
