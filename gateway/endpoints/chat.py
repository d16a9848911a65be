"""POST /v1/chat/completions: a conversation in, the assistant's turn out, streamed or whole.

Knows no queue and no token text beyond what it asks others for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from noria.engine.wire.messages import Usage
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.answering import Answer, Identity, respond
from noria.gateway.chat_question import chat_question
from noria.gateway.choice import Delta
from noria.gateway.collect import collect
from noria.gateway.delivery import delivery
from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.generation import Generation
from noria.gateway.kept_answer import KeptAnswer
from noria.gateway.schemas.answers import Chunks, Head, chat_logprobs, usage_fields
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.streaming import DONE

router = APIRouter()


@router.post("/chat/completions")
async def chat_completions(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    given = await json_object(request)
    body = parse(ChatRequest, given)
    wanted = delivery(request.headers, "chat/completions", given, stream=body.stream)
    question = await chat_question(services, body)

    def shape(identity: Identity) -> _Answer:
        return _Answer(body, question.model.card.id, question.model.tokenizer, identity)

    def kept(identity: Identity) -> KeptAnswer:
        return KeptAnswer(services.completions, tenant.id, given, lambda: shape(identity))

    return await respond(request, services, tenant, wanted, question, "chatcmpl-", kept if body.store else shape)


class _Answer(Answer):
    def __init__(self, request: ChatRequest, model_id: str, tokenizer: Tokenizer, identity: Identity) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._head = Head(
            id=identity.id,
            object="chat.completion.chunk" if request.stream else "chat.completion",
            created=identity.created,
            model=model_id,
            system_fingerprint=identity.fingerprint,
            service_tier=request.service_class,
        )
        self._chunks = Chunks(
            self._head, include_usage=request.include_usage, cursor=identity.cursor, obfuscate=request.obfuscates
        )

    async def whole(self, generation: Generation) -> dict[str, Any]:
        choices, usage = await collect(generation), generation.usage()
        listed: list[dict[str, Any]] = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []},
                "logprobs": self._logprobs(choice) if self._request.logprobs else None,
                "finish_reason": choice.finish,
            }
            for choice in choices
        ]
        return {**self._head.fields(), "choices": listed, "usage": usage_fields(usage)}

    def opening(self) -> bytes:
        return b"".join(self._chunks.role(index) for index in range(self._request.n))

    def of(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._chunks.chat(delta, self._rendered_logprobs(delta)) for delta in deltas])

    async def closing(self, usage: Usage) -> bytes:
        return (self._chunks.usage(usage) if self._request.include_usage else b"") + DONE

    def _rendered_logprobs(self, delta: Delta) -> bytes:
        return orjson.dumps(self._logprobs(delta)) if self._request.logprobs and delta.tokens else b"null"

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.tokens, self._request.top_logprobs or 0)
