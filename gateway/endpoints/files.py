"""/v1/files: upload, list, retrieve, delete, content.

Knows no store; bytes pass through here in pieces and are never held.
"""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from noria.gateway.dependencies import ServicesDep, TenantDep
from noria.gateway.endpoints.listing import json, listed, page, unknown_cursor
from noria.gateway.errors import InvalidRequest, WrongState
from noria.gateway.files import Description
from noria.gateway.http.body import arriving
from noria.gateway.multipart import FORM_BYTES, Form
from noria.gateway.schemas.files import UploadFields, nested, shown
from noria.gateway.schemas.strict import parse

router = APIRouter()

_MAX_LISTED = 10_000


@router.post("/files")
async def upload_file(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    form = Form(request.headers.get("content-type"))
    settings = services.settings
    body = arriving(request, settings.max_file_bytes + FORM_BYTES, settings.body_timeout)

    def described(_: int) -> Description:
        fields = parse(UploadFields, nested(form.fields))
        if form.filename is None:
            raise InvalidRequest("Missing required parameter: 'file'.", param="file", code="missing_required_parameter")
        return Description(
            form.filename, fields.purpose, fields.expires_after.seconds if fields.expires_after else None
        )

    file_id, file = await services.files.take_in(tenant.id, form.file(body), described)
    return json(shown(file_id, file))


@router.get("/files")
async def list_files(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    known = ("limit", "order", "after", "purpose")
    asked = page(request, default_limit=_MAX_LISTED, max_limit=_MAX_LISTED, only=known)
    if not asked.limit:
        return listed([], more=False)
    purpose = request.query_params.get("purpose")
    try:
        found, more = await services.files.page(
            tenant.id, purpose=purpose, after=asked.after, limit=asked.limit, descending=asked.descending
        )
    except KeyError:
        raise unknown_cursor(asked.after) from None
    return listed([shown(file_id, file) for file_id, file in found], more=more)


@router.get("/files/{file_id}")
async def retrieve_file(file_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    return json(shown(file_id, await services.files.find(tenant.id, file_id)))


@router.delete("/files/{file_id}")
async def delete_file(file_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    await services.files.find(tenant.id, file_id)
    reader = await services.batches.reading(tenant.id, file_id)
    if reader is not None:
        raise WrongState(
            f"The batch {reader.id} still reads this file. Cancel it first.", param="id", code="file_in_use"
        )
    await services.files.delete(tenant.id, file_id)
    return json({"id": file_id, "object": "file", "deleted": True})


@router.get("/files/{file_id}/content")
async def file_content(file_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    file = await services.files.find(tenant.id, file_id)
    headers = {
        "content-length": str(file.size),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
    }
    return StreamingResponse(services.files.read(tenant.id, file_id), 200, headers, "application/octet-stream")
