"""POST /v1/chat/completions: a conversation in, the assistant's turn out, streamed or whole.

Knows no queue and no token text beyond what it asks others for.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from noria.gateway.answering import Identity, respond
from noria.gateway.chat_answer import ChatAnswer
from noria.gateway.chat_question import chat_question
from noria.gateway.delivery import delivery
from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.kept_answer import KeptAnswer
from noria.gateway.parsing import parsed
from noria.gateway.schemas.chat import ChatRequest

router = APIRouter()


@router.post("/chat/completions")
async def chat_completions(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    given = await json_object(request)
    body = await parsed(ChatRequest, given)
    wanted = delivery(request.headers, "chat/completions", given, stream=body.stream)
    question = await chat_question(services, body)

    def shape(identity: Identity) -> ChatAnswer:
        return ChatAnswer(body, question, identity)

    def kept(identity: Identity) -> KeptAnswer:
        return KeptAnswer(services.completions, tenant.id, given, lambda: shape(identity))

    return await respond(request, services, tenant, wanted, question, "chatcmpl-", kept if body.store else shape)
