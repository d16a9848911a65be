"""GET, POST and DELETE of chat completions that were created with `store`.

Knows no store and no answer's shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.endpoints.listing import json, listed, page, unknown_cursor
from noria.gateway.errors import InvalidRequest
from noria.gateway.schemas.metadata import StoredChange
from noria.gateway.schemas.strict import parse

router = APIRouter()

_METADATA = re.compile(r"metadata\[(.{1,64})\]\Z", re.DOTALL)

_PAGED = ("limit", "order", "after")


@router.get("/chat/completions")
async def list_stored_completions(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    query = request.query_params
    keys = {name: key[1] for name in query if (key := _METADATA.match(name))}
    asked = page(request, default_order="asc", only=(*_PAGED, "model", *keys))
    if not asked.limit:
        return listed([], more=False)
    model, metadata = query.get("model"), {key: query[name] for name, key in keys.items()}

    def wanted(completion: Mapping[str, Any]) -> bool:
        has = completion["metadata"]
        return model in (None, completion["model"]) and all(has.get(key) == value for key, value in metadata.items())

    try:
        found, more = await services.completions.page(
            tenant.id, wanted, after=asked.after, limit=asked.limit, descending=asked.descending
        )
    except KeyError:
        raise unknown_cursor(asked.after) from None
    return listed(found, more=more)


@router.get("/chat/completions/{completion_id}")
async def retrieve_stored_completion(completion_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    return json(await services.completions.find(tenant.id, completion_id))


@router.post("/chat/completions/{completion_id}")
async def update_stored_completion(
    completion_id: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> Response:
    given = await json_object(request)
    if "metadata" not in given:
        message = "Missing required parameter: 'metadata'."
        raise InvalidRequest(message, param="metadata", code="missing_required_parameter")
    body = parse(StoredChange, given)
    return json(await services.completions.replace_metadata(tenant.id, completion_id, body.metadata))


@router.delete("/chat/completions/{completion_id}")
async def delete_stored_completion(completion_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    await services.completions.delete(tenant.id, completion_id)
    return json({"object": "chat.completion.deleted", "id": completion_id, "deleted": True})


@router.get("/chat/completions/{completion_id}/messages")
async def list_stored_messages(
    completion_id: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> Response:
    asked = page(request, default_order="asc", only=_PAGED)
    messages = await services.completions.messages(tenant.id, completion_id)
    if not asked.limit:
        return listed([], more=False)
    if asked.descending:
        messages.reverse()
    ids = [message["id"] for message in messages]
    if asked.after is not None and asked.after not in ids:
        raise unknown_cursor(asked.after)
    first = ids.index(asked.after) + 1 if asked.after is not None else 0
    return listed(messages[first : first + asked.limit], more=len(messages) > first + asked.limit)
