"""POST /v1/completions: prompts of text or token ids in, their continuations out, streamed or whole.

Knows no queue; `echo` is put before the first delta here, since only this endpoint has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from noria.engine.wire.messages import Usage
from noria.gateway.answering import Answer, Identity, respond
from noria.gateway.choice import Delta, ScoredToken
from noria.gateway.collect import collect
from noria.gateway.delivery import delivery
from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.generation import Generation
from noria.gateway.model_directory import ServedModel
from noria.gateway.prompts import kept_tokens, plain_prompt, room_left
from noria.gateway.sampling import check_stop_count, sampling_params, text_options
from noria.gateway.schemas.answers import Chunks, Head, completion_logprobs, usage_fields
from noria.gateway.schemas.completions import CompletionRequest
from noria.gateway.schemas.prompted import Prompt
from noria.gateway.schemas.strict import parse
from noria.gateway.services import Question
from noria.gateway.streaming import DONE
from noria.gateway.text.detokenizer import Detokenizer

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


@router.post("/completions")
async def completions(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    given = await json_object(request)
    body = parse(CompletionRequest, given)
    wanted = delivery(request.headers, "completions", given, stream=body.stream)
    check_stop_count(body, services.settings.max_stop_strings)
    services.check_choices(len(body.prompt), body.n)
    model = await services.directory.resolve(body.model)
    kept = kept_tokens(model.card, body, _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    prompts = [await plain_prompt(model, prompt, param="prompt", kept=kept) for prompt in body.prompt]
    scored_prompt = body.logprobs if body.echo else None
    params = [_params(model, body, len(prompt), scored_prompt) for prompt in prompts]
    options = text_options(model, body, logprobs=body.logprobs is not None)
    question = Question(model, body, prompts, params, options)

    def shape(identity: Identity) -> _Answer:
        return _Answer(body, model, prompts, identity)

    return await respond(request, services, tenant, wanted, question, "cmpl-", shape)


def _params(model: ServedModel, body: CompletionRequest, num_prompt: int, prompt_logprobs: int | None) -> Any:
    param = "prompt" if body.max_tokens is None else "max_tokens"
    room = room_left(model.card, num_prompt, body.max_tokens, default=_DEFAULT_MAX_TOKENS, param=param)
    return sampling_params(model.card, body, max_tokens=room, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt as it is shown before its continuation: its text, and its visible tokens with their offsets."""

    text: str
    token_ids: list[int]
    offsets: list[int]
    num_hidden: int  # leading tokens that the client did not write: the BOS token


class _Answer(Answer):
    def __init__(
        self, request: CompletionRequest, model: ServedModel, prompts: list[list[int]], identity: Identity
    ) -> None:
        self._request = request
        self._tokenizer = model.tokenizer
        self._head = Head(
            id=identity.id,
            object="text_completion",
            created=identity.created,
            model=model.card.id,
            system_fingerprint=identity.fingerprint,
            service_tier=request.service_class,
        )
        self._chunks = Chunks(self._head, include_usage=request.include_usage, cursor=identity.cursor)
        given = zip(request.prompt, prompts, strict=True)
        self._echoes = [_echo(model, prompt, ids) for prompt, ids in given] if request.echo else []
        self._begun: set[int] = set()

    async def whole(self, generation: Generation) -> dict[str, Any]:
        choices, usage = await collect(generation), generation.usage()
        listed = []
        for choice in choices:
            logprobs = self._with_prompt(choice, first=True)
            listed.append(
                {"index": choice.index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}
            )
        return {**self._head.fields(), "choices": listed, "usage": usage_fields(usage)}

    def opening(self) -> bytes:
        return b""

    def of(self, deltas: Sequence[Delta]) -> bytes:
        event = b""
        for delta in deltas:
            logprobs = self._with_prompt(delta, first=delta.index not in self._begun)
            self._begun.add(delta.index)
            event += self._chunks.text(delta, b"null" if logprobs is None else orjson.dumps(logprobs))
        return event

    async def closing(self, usage: Usage) -> bytes:
        return (self._chunks.usage(usage) if self._request.include_usage else b"") + DONE

    def _with_prompt(self, delta: Delta, *, first: bool) -> dict[str, Any] | None:
        """Put the echoed prompt before a choice's first delta; returns the log-probabilities of the whole."""
        echo = self._echoes[delta.index // self._request.n] if self._echoes else None
        scored_prompt = []
        if echo is not None and first:
            delta.text = echo.text + delta.text
            scores = (delta.prompt_logprobs or [None] * (len(echo.token_ids) + echo.num_hidden))[echo.num_hidden :]
            scored_prompt = list(zip(echo.token_ids, scores, echo.offsets, strict=True))
        if self._request.logprobs is None:
            return None
        shift = len(echo.text) if echo is not None else 0
        tokens = [ScoredToken(token.score, token.offset + shift) for token in delta.tokens] if shift else delta.tokens
        return completion_logprobs(self._tokenizer, tokens, self._request.logprobs, scored_prompt)


def _echo(model: ServedModel, prompt: Prompt, ids: list[int]) -> _Echo:
    tokenizer = model.tokenizer
    num_hidden = 0
    if isinstance(prompt, str) and ids[0] in (tokenizer.bos_id, tokenizer.eos_id) and (tokenizer.add_bos or not prompt):
        num_hidden = 1
    shown = ids[num_hidden:]
    detokenizer, offsets, num_chars, parts = Detokenizer(tokenizer), [], 0, []
    for token_id in shown:
        offsets.append(num_chars)
        parts.append(detokenizer.feed((token_id,)))
        num_chars += len(parts[-1])
    text = prompt if isinstance(prompt, str) else "".join(parts) + detokenizer.flush()
    return _Echo(text, shown, offsets, num_hidden)
