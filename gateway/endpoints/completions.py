"""POST /v1/completions: prompts of text or token ids in, their continuations out, streamed or whole.

Knows no queue; `echo` is put before the first delta here, since only this endpoint has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from noria.engine.wire.messages import SamplingParams, TokenLogprob, Usage
from noria.gateway.answering import Answer, Identity, respond
from noria.gateway.choice import Delta, ScoredToken
from noria.gateway.collect import collect
from noria.gateway.delivery import delivery
from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.echo import echo
from noria.gateway.errors import InvalidRequest
from noria.gateway.generation import Generation
from noria.gateway.model_directory import ServedModel
from noria.gateway.parsing import parsed
from noria.gateway.prompts import kept_tokens, plain_prompt, room_left
from noria.gateway.sampling import check_stop_count, sampling_params, text_options
from noria.gateway.schemas.answers import Chunks, Head, PromptToken, completion_logprobs, prompt_scores, usage_fields
from noria.gateway.schemas.completions import CompletionRequest
from noria.gateway.schemas.prompted import Prompt
from noria.gateway.services import Question
from noria.gateway.streaming import DONE
from noria.gateway.text.infill import infill_prompt

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


@router.post("/completions")
async def completions(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    given = await json_object(request)
    body = await parsed(CompletionRequest, given)
    wanted = delivery(request.headers, "completions", given, stream=body.stream)
    check_stop_count(body, services.settings.max_stop_strings)
    services.check_choices(len(body.prompt), body.samples, "n" if body.samples == body.n else "best_of")
    model = await services.directory.resolve(body.model)
    prompts = [await _encoded(model, body, prompt) for prompt in body.prompt]
    params = [_params(model, body, len(prompt)) for prompt in prompts]
    options = text_options(model, body, logprobs=body.wanted_logprobs is not None)
    question = Question(model, body, prompts, params, options)

    def shape(identity: Identity) -> _Answer:
        return _Answer(body, question, identity)

    return await respond(request, services, tenant, wanted, question, "cmpl-", shape)


async def _encoded(model: ServedModel, body: CompletionRequest, prompt: Prompt) -> list[int]:
    kept = kept_tokens(model.card, body, _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    ids = await plain_prompt(
        model,
        prompt,
        param="prompt",
        add_special_tokens=body.add_special_tokens,
        kept=kept,
        may_be_empty=bool(body.suffix),
    )
    if not body.suffix:
        return ids
    infill = infill_prompt(model.tokenizer, ids, body.suffix)
    if infill is None:
        message = f"Unsupported parameter: 'suffix': the model '{model.card.id}' has no tokens for filling in a text."
        raise InvalidRequest(message, param="suffix", code="unsupported_parameter")
    return infill


def _params(model: ServedModel, body: CompletionRequest, num_prompt: int) -> SamplingParams:
    param = "prompt" if body.max_tokens is None else "max_tokens"
    room = room_left(model.card, num_prompt, body.max_tokens, default=_DEFAULT_MAX_TOKENS, param=param)
    return sampling_params(
        model.card,
        body,
        max_tokens=room,
        logprobs=body.wanted_logprobs,
        prompt_logprobs=body.wanted_prompt_logprobs,
    )


class _Answer(Answer):
    def __init__(self, request: CompletionRequest, question: Question, identity: Identity) -> None:
        self._request = request
        self._tokenizer = question.model.tokenizer
        self._prompts = question.prompts
        self._head = Head(
            id=identity.id,
            object="text_completion",
            created=identity.created,
            model=question.model.card.id,
            system_fingerprint=identity.fingerprint,
            service_tier=request.service_class,
        )
        self._chunks = Chunks(
            self._head, include_usage=request.include_usage, cursor=identity.cursor, obfuscate=request.obfuscates
        )
        cut = request.truncate_prompt_tokens is not None
        self._echoes = [
            echo(self._tokenizer, ids if cut else given, ids, question.options.spelled)
            for given, ids in (zip(request.prompt, question.prompts, strict=True) if request.echo else ())
        ]
        self._begun: set[int] = set()

    async def whole(self, generation: Generation) -> dict[str, Any]:
        choices, usage = await collect(generation), generation.usage()
        listed = []
        for choice in self._best(choices):
            logprobs = self._with_prompt(choice, first=True)
            listed.append(
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": logprobs,
                    "finish_reason": choice.finish,
                    **self._extras(choice, first=True),
                }
            )
        return {**self._head.fields(), "choices": listed, "usage": usage_fields(usage)}

    def opening(self) -> bytes:
        return b""

    def of(self, deltas: Sequence[Delta]) -> bytes:
        event = b""
        for delta in deltas:
            first = delta.index not in self._begun
            self._begun.add(delta.index)
            logprobs = self._with_prompt(delta, first=first)
            extras = self._extras(delta, first=first)
            fields = b"," + orjson.dumps(extras)[1:-1] if extras else b""
            event += self._chunks.text(delta, b"null" if logprobs is None else orjson.dumps(logprobs), fields)
        return event

    async def closing(self, usage: Usage) -> bytes:
        return (self._chunks.usage(usage) if self._request.include_usage else b"") + DONE

    def _best(self, choices: Sequence[Delta]) -> Sequence[Delta]:
        """Of every prompt's samples the `n` likeliest by the mean log-probability of their tokens, best first."""
        samples, n = self._request.samples, self._request.n
        if samples == n:
            return choices
        best = []
        for start in range(0, len(choices), samples):
            ranked = sorted(choices[start : start + samples], key=lambda c: -c.total_logprob / max(1, c.consumed))
            best += ranked[:n]
        for index, choice in enumerate(best):
            choice.index = index
        return best

    def _with_prompt(self, delta: Delta, *, first: bool) -> dict[str, Any] | None:
        """Put the echoed prompt before a choice's first delta; returns the log-probabilities of the whole."""
        shown = self._echoes[delta.index // self._request.n] if self._echoes else None
        scored: list[PromptToken] = []
        if shown is not None and first:
            delta.text = shown.text + delta.text
            unscored: list[TokenLogprob | None] = [None] * (len(shown.token_ids) + shown.num_hidden)
            scores = (delta.prompt_logprobs or unscored)[shown.num_hidden :]
            scored = list(zip(shown.token_ids, scores, shown.offsets, strict=True))
        if self._request.logprobs is None:
            return None
        shift = len(shown.text) if shown is not None else 0
        tokens = [ScoredToken(token.score, token.offset + shift) for token in delta.tokens] if shift else delta.tokens
        return completion_logprobs(self._tokenizer, tokens, self._request.logprobs, scored)

    def _extras(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        """vLLM's further fields of a choice: what stopped it, and others where they were asked for."""
        request = self._request
        extras: dict[str, Any] = {"stop_reason": delta.stop_reason} if delta.finish else {}
        if request.prompt_logprobs is not None and first:
            scores = delta.prompt_logprobs or [None]
            extras["prompt_logprobs"] = prompt_scores(self._tokenizer, scores, request.prompt_logprobs)
        if request.return_token_ids:
            if first:
                extras["prompt_token_ids"] = self._prompts[delta.index // request.n]
            extras["token_ids"] = delta.token_ids
        return extras
