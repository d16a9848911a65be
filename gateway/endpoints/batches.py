"""/v1/batches: create, retrieve, list, cancel.

Knows no line and no runner: what is created here is found by whoever has room for it.
"""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter, Request, Response
from starlette.routing import Match

from noria.engine.wire.batch_store import BatchKey
from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.endpoints.listing import json, listed, page, unknown_cursor
from noria.gateway.errors import InvalidRequest, WrongState
from noria.gateway.files import BATCH_FILE_LIFE, MAX_BATCH_BYTES, new_id
from noria.gateway.schemas.batches import WINDOW, Batch, BatchRequest, shown
from noria.gateway.schemas.strict import parse
from noria.gateway.services import Services

router = APIRouter()

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""What OpenAI runs in batches, of texts; those of them that this server has can be asked for."""

_SPARE = 7 * 86_400
"""Seconds that files outlive the window of a batch that needs them, should all gateways be away for long."""


@router.post("/batches")
async def create_batch(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = parse(BatchRequest, await json_object(request))
    choice = [endpoint for endpoint in ENDPOINTS if _is_served(request, endpoint)]
    if body.endpoint not in choice:
        message = f"Invalid value for 'endpoint': '{body.endpoint}'. Supported values are: {', '.join(choice)}."
        raise InvalidRequest(message, param="endpoint", code="invalid_value")
    given = await services.files.find(tenant.id, body.input_file_id, param="input_file_id")
    if given.purpose != "batch":
        message = f"The file {body.input_file_id} was not uploaded with the purpose 'batch'."
        raise InvalidRequest(message, param="input_file_id", code="invalid_purpose")
    if given.size > MAX_BATCH_BYTES:
        message = f"The file {body.input_file_id} has more than the {MAX_BATCH_BYTES} bytes allowed."
        raise InvalidRequest(message, param="input_file_id", code="file_too_large")
    life = body.output_expires_after.seconds if body.output_expires_after else BATCH_FILE_LIFE
    batch = Batch(
        id=f"batch_{secrets.token_hex(16)}",
        tenant=tenant.id,
        weight=tenant.weight,
        cache_group=tenant.cache_group,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        output_file_id=new_id(),
        error_file_id=new_id(),
        created_at=int(time.time()),
        output_life=life,
        metadata=body.metadata,
        account=tenant.account,
    )
    await services.files.keep_for(tenant.id, batch.input_file_id, WINDOW + _SPARE)
    for file_id, what in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
        await services.files.begin(tenant.id, file_id, f"{batch.id}_{what}.jsonl", life=WINDOW + _SPARE)
    await services.batches.add(batch)
    return await _shown(services, batch)


@router.get("/batches")
async def list_batches(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    asked = page(request, only=("limit", "after"))
    if not asked.limit:
        return listed([], more=False)
    try:
        found, more = await services.batches.page(tenant.id, after=asked.after, limit=asked.limit)
    except KeyError:
        raise unknown_cursor(asked.after) from None
    return listed([shown(batch, await services.batches.counts(batch)) for batch in found], more=more)


@router.get("/batches/{batch_id}")
async def retrieve_batch(batch_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    return await _shown(services, await services.batches.find(BatchKey(tenant.id, batch_id)))


@router.post("/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    def step(batch: Batch) -> Batch:
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise WrongState(f"Cannot cancel a batch with status '{batch.status}'.", param="batch_id")
        return batch.at("cancelling", time.time())

    return await _shown(services, await services.batches.change(BatchKey(tenant.id, batch_id), step))


def _is_served(request: Request, path: str) -> bool:
    asked = {**request.scope, "method": "POST", "path": path}
    return any(route.matches(asked)[0] is Match.FULL for route in request.app.routes)


async def _shown(services: Services, batch: Batch) -> Response:
    return json(shown(batch, await services.batches.counts(batch)))
