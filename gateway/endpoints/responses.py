"""/v1/responses: an answer from items, kept for later; its retrieval, deletion, cancellation and input.

Knows no queue: what runs without a client is `Background`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

import orjson
from fastapi import APIRouter, Depends, Request, Response

from noria.gateway.answering import Identity, respond
from noria.gateway.delivery import delivery
from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.endpoints import listing
from noria.gateway.errors import InvalidRequest, ModelNotFound, Overloaded
from noria.gateway.responses import ids, response
from noria.gateway.responses.answer import ResponseAnswer, replayed
from noria.gateway.responses.asking import ask
from noria.gateway.responses.background import Background
from noria.gateway.responses.compaction import compact
from noria.gateway.responses.context import Context, Shelves, gather
from noria.gateway.responses.events import EventWriter
from noria.gateway.responses.parts import Shown
from noria.gateway.responses.stored import RUNNING, StoredResponse
from noria.gateway.sampling import settled
from noria.gateway.schemas.responses import CompactRequest, Include, InputTokensRequest, ResponseRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.services import Question, Services, Tenant
from noria.gateway.streaming import EventStream

router = APIRouter()


def shelves(request: Request) -> Shelves:
    found: Shelves = request.app.state.shelves
    return found


def background(request: Request) -> Background:
    found: Background = request.app.state.background
    return found


ShelvesDep = Annotated[Shelves, Depends(shelves)]
BackgroundDep = Annotated[Background, Depends(background)]


@router.post("/responses")
async def create_response(
    request: Request, services: ServicesDep, shelves: ShelvesDep, background: BackgroundDep, tenant: TenantDep
) -> Response:
    given = await json_object(request)
    body = parse(ResponseRequest, given)
    wanted = delivery(request.headers, "responses", given, stream=body.stream)
    if wanted.resumable or wanted.last_event is not None:
        message = "Responses are resumed with 'background', and 'starting_after' on GET /responses/{id}."
        raise InvalidRequest(message, param="X-Noria-Resumable" if wanted.resumable else "Last-Event-ID")
    context = await gather(shelves, tenant.id, body)
    question = await ask(services, body, context.items, context.files)
    if body.background:
        if wanted.key is not None:
            message = "'Idempotency-Key' is not supported together with 'background'."
            raise InvalidRequest(message, param="Idempotency-Key")
        return await _in_background(services, shelves, background, tenant, body, given, question, context)

    def shape(identity: Identity) -> ResponseAnswer:
        card = question.model.card
        begun = response.begun(settled(card, body), response_id=identity.id, model=card.id, created=identity.created)
        group = identity.id.removeprefix(ids.RESPONSE)

        async def conclude(ended: Shown) -> Shown:
            own = context.own_items(group)
            if body.conversation is not None:
                items = [*own, *ended["output"]]
                await shelves.conversations.append(tenant.id, body.conversation.id, items)
            if body.store:
                kept = StoredResponse(orjson.dumps(ended), orjson.dumps(own), context.chain)
                await shelves.responses.put(tenant.id, kept)
            return ended

        events = EventWriter(obfuscated=body.obfuscated) if body.stream else None
        return ResponseAnswer(body, begun, question.model.tokenizer, question.options, conclude, events)

    return await respond(request, services, tenant, wanted, question, ids.RESPONSE, shape)


async def _in_background(
    services: Services,
    shelves: Shelves,
    background: Background,
    tenant: Tenant,
    body: ResponseRequest,
    given: Mapping[str, Any],
    question: Question,
    context: Context,
) -> Response:
    begun = await background.begin(tenant, body, dict(given), question, context)
    if not body.stream:
        return listing.json(begun)
    stored = await shelves.responses.get(tenant.id, begun["id"])
    return await _stream(services, background, tenant, stored, EventWriter(obfuscated=body.obfuscated))


@router.post("/responses/input_tokens")
async def count_input_tokens(
    request: Request, services: ServicesDep, shelves: ShelvesDep, tenant: TenantDep
) -> Response:
    body = parse(InputTokensRequest, await json_object(request))
    context = await gather(shelves, tenant.id, body)
    question = await ask(services, body, context.items, context.files)
    return listing.json({"object": "response.input_tokens", "input_tokens": len(question.prompts[0])})


@router.post("/responses/compact")
async def compact_response(request: Request, services: ServicesDep, shelves: ShelvesDep, tenant: TenantDep) -> Response:
    body = parse(CompactRequest, await json_object(request))
    context = await gather(shelves, tenant.id, body)
    return listing.json(await compact(services, tenant, body, context))


@router.get("/responses/{response_id}")
async def get_response(
    request: Request,
    response_id: str,
    services: ServicesDep,
    shelves: ShelvesDep,
    background: BackgroundDep,
    tenant: TenantDep,
) -> Response:
    stream, obfuscated = listing.flag(request, "stream"), listing.flag(request, "include_obfuscation")
    listing.included(request, get_args(Include))
    starting_after = listing.integer(request, "starting_after", -1)
    stored = await shelves.responses.get(tenant.id, response_id)
    if not stream:
        return listing.json(await background.status(stored))
    events = EventWriter(starting_after=starting_after, obfuscated=obfuscated)
    return await _stream(services, background, tenant, stored, events)


async def _stream(
    services: Services, background: Background, tenant: Tenant, stored: StoredResponse, events: EventWriter
) -> Response:
    """The stream of a kept response: as it was, where its tokens are still there, else its items whole."""
    shown = stored.response
    if stored.job is not None and (stored.answer is not None or shown["status"] in RUNNING):
        try:
            generation, ticket = await background.follow(tenant.id, stored)
            return EventStream(generation, ticket.shape(events), services.metrics.streams_open)
        except (ModelNotFound, Overloaded):
            if shown["status"] in RUNNING:
                raise
    return Response(replayed(shown, events), media_type="text/event-stream", headers={"cache-control": "no-cache"})


@router.delete("/responses/{response_id}")
async def delete_response(
    response_id: str, shelves: ShelvesDep, background: BackgroundDep, tenant: TenantDep
) -> Response:
    stored = await shelves.responses.get(tenant.id, response_id)
    if stored.response["status"] in RUNNING:
        await background.cancel(tenant.id, stored)
    await shelves.responses.delete(tenant.id, response_id)
    return listing.json({"id": response_id, "object": "response", "deleted": True})


@router.post("/responses/{response_id}/cancel")
async def cancel_response(
    response_id: str, shelves: ShelvesDep, background: BackgroundDep, tenant: TenantDep
) -> Response:
    stored = await shelves.responses.get(tenant.id, response_id)
    if stored.job is None:
        raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
    return listing.json(await background.cancel(tenant.id, stored))


@router.get("/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str, shelves: ShelvesDep, tenant: TenantDep) -> Response:
    """The items of the request itself; what it went on with is listed with the responses that it names."""
    wanted = listing.page(request)
    listing.included(request, get_args(Include))
    stored = await shelves.responses.get(tenant.id, response_id)
    items = stored.input_items[:: -1 if wanted.descending else 1]
    places = {item["id"]: place for place, item in enumerate(items)}
    first = 0 if wanted.after is None else places.get(wanted.after, len(items)) + 1
    last = len(items) if wanted.before is None else places.get(wanted.before, 0)
    chosen = items[first:last]
    return listing.listed(chosen[: wanted.limit], more=len(chosen) > wanted.limit)
