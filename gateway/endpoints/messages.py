"""/v1/messages, Anthropic's dialect of a chat, and how many tokens such a chat would be.

Knows no queue and no block.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from noria.gateway.answering import Identity, respond
from noria.gateway.delivery import delivery
from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.endpoints import listing
from noria.gateway.errors import InvalidRequest
from noria.gateway.messages.answer import MessageAnswer
from noria.gateway.messages.asking import ask
from noria.gateway.schemas.anthropic import CountTokensRequest, MessagesRequest
from noria.gateway.schemas.strict import parse

router = APIRouter()


@router.post("/messages")
async def create_message(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    given = await json_object(request)
    body = parse(MessagesRequest, given)
    wanted = delivery(request.headers, "messages", given, stream=body.stream)
    if wanted.resumable or wanted.last_event is not None:
        param = "X-Noria-Resumable" if wanted.resumable else "Last-Event-ID"
        raise InvalidRequest(f"Invalid '{param}': streams of messages are not resumed.", param=param)
    question = await ask(services, body)

    def shape(identity: Identity) -> MessageAnswer:
        return MessageAnswer(body, question, identity.id, request.state.request_id)

    return await respond(request, services, tenant, wanted, question, "msg_", shape)


@router.post("/messages/count_tokens")
async def count_message_tokens(request: Request, services: ServicesDep, _: TenantDep) -> Response:
    body = parse(CountTokensRequest, await json_object(request))
    question = await ask(services, body)
    return listing.json({"input_tokens": len(question.prompts[0])})
