"""/v1/uploads: create, add a part, complete, cancel.

Knows no store; bytes pass through here in pieces and are never held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ServicesDep, TenantDep, json_object
from noria.gateway.endpoints.listing import json
from noria.gateway.errors import InvalidRequest
from noria.gateway.http.body import arriving
from noria.gateway.multipart import FORM_BYTES, Form
from noria.gateway.schemas.strict import parse
from noria.gateway.schemas.uploads import MAX_PART_BYTES, CompleteUploadRequest, UploadRequest, shown, shown_part

router = APIRouter()


@router.post("/uploads")
async def create_upload(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = parse(UploadRequest, await json_object(request))
    upload_id, upload = await services.uploads.create(tenant.id, body)
    return json(shown(upload_id, upload))


@router.post("/uploads/{upload_id}/parts")
async def add_upload_part(upload_id: str, request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    form = Form(request.headers.get("content-type"), "data")
    body = arriving(request, MAX_PART_BYTES + FORM_BYTES, services.settings.body_timeout)

    async def data() -> AsyncIterator[bytes]:
        async for piece in form.file(body):
            yield piece
        if form.filename is None:
            raise InvalidRequest("Missing required parameter: 'data'.", param="data", code="missing_required_parameter")

    part_id, part = await services.uploads.add_part(tenant.id, upload_id, data())
    return json(shown_part(upload_id, part_id, part))


@router.post("/uploads/{upload_id}/complete")
async def complete_upload(upload_id: str, request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = parse(CompleteUploadRequest, await json_object(request))
    upload, file = await services.uploads.complete(tenant.id, upload_id, body.part_ids, body.md5)
    return json(shown(upload_id, upload, file))


@router.post("/uploads/{upload_id}/cancel")
async def cancel_upload(upload_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    return json(shown(upload_id, await services.uploads.cancel(tenant.id, upload_id)))
