"""POST /v1/chat/completions: a conversation in, the assistant's turn out, streamed or whole.

Knows no queue and no token text beyond what it asks others for.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from noria.gateway.choice import Delta
from noria.gateway.collect import collect
from noria.gateway.dependencies import ServicesDep, TenantDep, json_object, until_client_leaves
from noria.gateway.generation import Generation
from noria.gateway.model_directory import ServedModel
from noria.gateway.prompts import chat_prompt, room_left
from noria.gateway.sampling import check_stop_count, sampling_params, text_options
from noria.gateway.schemas.answers import Chunks, Head, chat_logprobs, usage_fields
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.streaming import DONE, EventStream

router = APIRouter()


@router.post("/chat/completions")
async def chat_completions(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = parse(ChatRequest, await json_object(request))
    check_stop_count(body, services.settings.max_stop_strings)
    services.check_choices(1, body.n)
    model = await services.directory.resolve(body.model)
    prompt = await chat_prompt(model, body)
    param = "messages" if body.wanted_tokens is None else "max_tokens"
    max_tokens = room_left(model.card, len(prompt), body.wanted_tokens, default=None, param=param)
    params = sampling_params(
        model.card, body, max_tokens=max_tokens, logprobs=body.wanted_logprobs, prompt_logprobs=None
    )
    options = text_options(model.card, body, logprobs=body.logprobs)
    generation = services.generation(tenant, model, body, [prompt], [params], options)
    answer = _Answer(body, model)
    if body.stream:
        return EventStream(generation, answer.events(generation), services.metrics.streams_open)
    choices = await until_client_leaves(request, collect(generation))
    return Response(orjson.dumps(answer.whole(choices, generation)), media_type="application/json")


class _Answer:
    def __init__(self, request: ChatRequest, model: ServedModel) -> None:
        self._request = request
        self._tokenizer = model.tokenizer
        self._head = Head(
            id=f"chatcmpl-{secrets.token_hex(14)}",
            object="chat.completion.chunk" if request.stream else "chat.completion",
            created=int(time.time()),
            model=model.card.id,
            system_fingerprint=model.card.fingerprint,
            service_tier=request.service_class,
        )

    def whole(self, choices: list[Delta], generation: Generation) -> dict[str, Any]:
        listed: list[dict[str, Any]] = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []},
                "logprobs": self._logprobs(choice) if self._request.logprobs else None,
                "finish_reason": choice.finish,
            }
            for choice in choices
        ]
        return {**self._head.fields(), "choices": listed, "usage": usage_fields(generation.usage())}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        chunks = Chunks(self._head, include_usage=self._request.include_usage)
        yield b"".join(chunks.role(index) for index in range(generation.num_choices))
        async for deltas in generation.deltas():
            yield b"".join(chunks.chat(delta, self._rendered_logprobs(delta)) for delta in deltas)
        if self._request.include_usage:
            yield chunks.usage(generation.usage())
        yield DONE

    def _rendered_logprobs(self, delta: Delta) -> bytes:
        return orjson.dumps(self._logprobs(delta)) if self._request.logprobs and delta.tokens else b"null"

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.tokens, self._request.top_logprobs or 0)
