"""From the fields of a request to the engine's sampling parameters, checked against the model's vocabulary.

Knows no prompt and no endpoint.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

from pydantic import BaseModel

from noria.engine.wire.messages import ModelCard, SamplingParams
from noria.gateway.choice import TextOptions
from noria.gateway.errors import InvalidRequest
from noria.gateway.model_directory import ServedModel
from noria.gateway.schemas.sampling import SamplingFields

Request = TypeVar("Request", bound=BaseModel)

_MASK = 2**64 - 1
_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them overflows, and the best token wins all the same."""

_SMALLEST_TOP_P = 1e-9
"""`top_p` 0 is legal in the API and means the smallest nucleus, the best token."""


def sampling_params(
    card: ModelCard, request: SamplingFields, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Parameters of every choice of a request, but for the seed. Raises `InvalidRequest` for ids that do not exist."""
    request = settled(card, request)
    bias = {int(key): value for key, value in request.logit_bias.items()}
    check_ids(card, list(bias), "logit_bias")
    check_ids(card, request.stop_token_ids, "stop_token_ids")
    if request.min_tokens > max_tokens:
        message = f"Invalid 'min_tokens': {request.min_tokens} is more than the {max_tokens} output tokens allowed."
        raise InvalidRequest(message, param="min_tokens", code="invalid_value")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature if request.temperature >= _GREEDY_BELOW else 0.0,
        top_p=max(request.top_p, _SMALLEST_TOP_P),
        top_k=min(max(request.top_k, 0), card.vocab_size),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=bias,
        min_tokens=request.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)),
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=request.grammar,
    )


def settled(card: ModelCard, request: Request) -> Request:
    """The request with the model's own sampling where it is silent."""
    silent = {name: value for name, value in card.sampling_defaults.items() if name not in request.model_fields_set}
    return request.model_copy(update=silent) if silent else request


def text_options(model: ServedModel, request: SamplingFields, *, logprobs: bool) -> TextOptions:
    """The text conditions of every choice. What stops an answer is no part of it unless it is asked for."""
    # A fulfilled grammar ends an answer whatever else is asked for.
    eos = () if request.ignore_eos and request.grammar is None else model.card.eos_token_ids
    ends = () if request.include_stop_str_in_output else (*eos, *request.stop_token_ids)
    return TextOptions(
        stop=tuple(dict.fromkeys(request.stop)),
        include_stop=request.include_stop_str_in_output,
        min_tokens=request.min_tokens,
        end_ids=frozenset(ends),
        stop_ids=frozenset(request.stop_token_ids).difference(eos),  # vLLM takes those for the model's own end
        logprobs=logprobs,
        token_ids=request.return_token_ids,
        spelled=frozenset() if request.skip_special_tokens else frozenset(model.tokenizer.control_tokens.values()),
    )


def check_stop_count(request: SamplingFields, limit: int) -> None:
    if len(request.stop) > limit:
        message = f"Invalid 'stop': {len(request.stop)} strings are more than the {limit} allowed."
        raise InvalidRequest(message, param="stop", code="array_above_max_length")


def seeds(seed: int | None, num_prompts: int, n: int) -> list[int]:
    """One 64-bit seed per choice, prompt-major. A given seed is the first choice's own, for every prompt alike, so
    that a prompt gives the same text alone and in a list; without one, every choice gets noise of its own."""
    if seed is None:
        return [secrets.randbits(64) for _ in range(num_prompts * n)]
    return [_mixed(seed & _MASK, choice) for _ in range(num_prompts) for choice in range(n)]


def _mixed(seed: int, choice: int) -> int:
    """The finaliser of SplitMix64 over seed and choice (Steele, Lea, Flood 2014); choice 0 keeps the seed."""
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def check_ids(card: ModelCard, token_ids: list[int], param: str) -> None:
    """Raises `InvalidRequest` for an id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < card.vocab_size:
            message = f"Invalid '{param}': token id {token_id} is outside the vocabulary (0 to {card.vocab_size - 1})."
            raise InvalidRequest(message, param=param, code="invalid_value")
