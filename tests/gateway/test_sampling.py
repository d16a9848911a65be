"""A model's own sampling where a request is silent."""

from __future__ import annotations

import asyncio

import msgspec

from noria.gateway.responses.asking import _chat
from noria.gateway.sampling import sampling_params, settled
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.responses import ResponseRequest
from noria.gateway.schemas.strict import parse
from tests.gateway.test_metrics import CARD

MODEL = msgspec.structs.replace(
    CARD, sampling_defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
)
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def test_silent_fields_are_the_models_and_given_ones_stay() -> None:
    for given, expected in (
        ({}, (0.6, 0.9, 20, 1.1)),
        ({"temperature": 1.0, "top_k": 0}, (1.0, 0.9, 0, 1.1)),
        ({"temperature": None, "repetition_penalty": 1.0}, (0.6, 0.9, 20, 1.0)),
    ):
        request = parse(ChatRequest, ASKED | given)
        params = sampling_params(MODEL, request, max_tokens=5, logprobs=None, prompt_logprobs=None)
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == expected
    plain = sampling_params(CARD, parse(ChatRequest, ASKED), max_tokens=5, logprobs=None, prompt_logprobs=None)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.repetition_penalty) == (1.0, 1.0, 0, 1.0)


def test_a_response_shows_what_holds_and_asks_for_no_more_than_was_said() -> None:
    request = parse(ResponseRequest, {"model": "tiny", "input": "hi", "top_p": 0.5})
    shown = settled(MODEL, request)
    assert (shown.temperature, shown.top_p) == (0.6, 0.5)
    asked = asyncio.run(_chat(request, [{"role": "user", "content": "hi"}]))
    assert "top_p" in asked.model_fields_set and "temperature" not in asked.model_fields_set
