"""/v1/conversations: items that answers build on and are added to.

Knows no model.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import TenantDep, json_object
from noria.gateway.endpoints import listing
from noria.gateway.endpoints.responses import ShelvesDep
from noria.gateway.responses import ids
from noria.gateway.responses.context import numbered
from noria.gateway.schemas.conversations import ConversationChange, ConversationRequest, ItemsRequest
from noria.gateway.schemas.strict import parse

router = APIRouter()


@router.post("/conversations")
async def create_conversation(request: Request, shelves: ShelvesDep, tenant: TenantDep) -> Response:
    body = parse(ConversationRequest, await json_object(request))
    items = numbered(body.items, ids.new_group())
    return listing.json(await shelves.conversations.create(tenant.id, body.metadata, items))


@router.get("/conversations/{conversation_id}")
async def get_conversation(conversation_id: str, shelves: ShelvesDep, tenant: TenantDep) -> Response:
    return listing.json(await shelves.conversations.get(tenant.id, conversation_id))


@router.post("/conversations/{conversation_id}")
async def update_conversation(
    request: Request, conversation_id: str, shelves: ShelvesDep, tenant: TenantDep
) -> Response:
    body = parse(ConversationChange, await json_object(request))
    return listing.json(await shelves.conversations.update(tenant.id, conversation_id, body.metadata))


@router.delete("/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, shelves: ShelvesDep, tenant: TenantDep) -> Response:
    await shelves.conversations.delete(tenant.id, conversation_id)
    return listing.json({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get("/conversations/{conversation_id}/items")
async def list_conversation_items(
    request: Request, conversation_id: str, shelves: ShelvesDep, tenant: TenantDep
) -> Response:
    wanted = listing.page(request)
    items, more = await shelves.conversations.page(
        tenant.id, conversation_id, after=wanted.after, limit=wanted.limit, descending=wanted.descending
    )
    return listing.listed(items, more=more)


@router.post("/conversations/{conversation_id}/items")
async def create_conversation_items(
    request: Request, conversation_id: str, shelves: ShelvesDep, tenant: TenantDep
) -> Response:
    body = parse(ItemsRequest, await json_object(request))
    items = numbered(body.items, ids.new_group())
    await shelves.conversations.append(tenant.id, conversation_id, items)
    return listing.listed(items, more=False)


@router.get("/conversations/{conversation_id}/items/{item_id}")
async def get_conversation_item(conversation_id: str, item_id: str, shelves: ShelvesDep, tenant: TenantDep) -> Response:
    return listing.json(await shelves.conversations.item(tenant.id, conversation_id, item_id))


@router.delete("/conversations/{conversation_id}/items/{item_id}")
async def delete_conversation_item(
    conversation_id: str, item_id: str, shelves: ShelvesDep, tenant: TenantDep
) -> Response:
    return listing.json(await shelves.conversations.delete_item(tenant.id, conversation_id, item_id))
