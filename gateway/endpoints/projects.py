"""/v1/organization/projects: an organisation's projects and their API keys.

Knows no store. Only admin keys come in here.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ActorDep, AdministrationDep, AdministratorDep, json_object
from noria.gateway.endpoints.listing import flag, json
from noria.gateway.endpoints.organizations import paged
from noria.gateway.schemas.administration import (
    ApiKeyCreate,
    ApiKeyRotate,
    ApiKeyUpdate,
    ProjectCreate,
    ProjectUpdate,
    chosen,
    shown_key,
    shown_project,
)
from noria.gateway.schemas.strict import parse
from noria.gateway.tenancy.administration import Administration
from noria.gateway.tenancy.records import ApiKey

router = APIRouter(prefix="/organization/projects")


@router.get("")
async def list_projects(
    request: Request, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    snapshot = await administration.directory.snapshot(administrator.organization)
    archived = flag(request, "include_archived")
    return paged(request, [shown_project(p) for p in snapshot.projects if archived or p.archived_at is None])


@router.post("")
async def create_project(
    request: Request, administrator: AdministratorDep, administration: AdministrationDep, actor: ActorDep
) -> Response:
    body = parse(ProjectCreate, await json_object(request))
    return json(shown_project(await administration.create_project(actor, administrator.organization, chosen(body))))


@router.get("/{project_id}")
async def retrieve_project(
    project_id: str, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    return json(shown_project(await administration.project(administrator.organization, project_id)))


@router.post("/{project_id}")
async def change_project(
    project_id: str,
    request: Request,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    body = parse(ProjectUpdate, await json_object(request))
    changed = await administration.change_project(actor, administrator.organization, project_id, chosen(body))
    return json(shown_project(changed))


@router.post("/{project_id}/archive")
async def archive_project(
    project_id: str, administrator: AdministratorDep, administration: AdministrationDep, actor: ActorDep
) -> Response:
    return json(shown_project(await administration.archive_project(actor, administrator.organization, project_id)))


@router.get("/{project_id}/api_keys")
async def list_keys(
    project_id: str, request: Request, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    keys = await administration.keys(administrator.organization, project_id)
    used = await administration.directory.last_used(administrator.organization, [key.id for key in keys])
    return paged(request, [shown_key(key, used.get(key.id)) for key in keys])


@router.post("/{project_id}/api_keys")
async def create_key(
    project_id: str,
    request: Request,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    body = parse(ApiKeyCreate, await json_object(request))
    key, secret = await administration.create_key(actor, administrator.organization, project_id, chosen(body))
    return json({**shown_key(key), "value": secret.value})


@router.get("/{project_id}/api_keys/{key_id}")
async def retrieve_key(
    project_id: str, key_id: str, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    key = await administration.key(administrator.organization, project_id, key_id)
    return json(await _shown(administration, administrator.organization, key))


@router.post("/{project_id}/api_keys/{key_id}")
async def change_key(
    project_id: str,
    key_id: str,
    request: Request,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    body = parse(ApiKeyUpdate, await json_object(request))
    key = await administration.change_key(actor, administrator.organization, project_id, key_id, chosen(body))
    return json(await _shown(administration, administrator.organization, key))


@router.post("/{project_id}/api_keys/{key_id}/rotate")
async def rotate_key(
    project_id: str,
    key_id: str,
    request: Request,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    body = parse(ApiKeyRotate, await json_object(request))
    organization_id = administrator.organization
    key, secret = await administration.rotate_key(actor, organization_id, project_id, key_id, body.grace_seconds)
    return json({**await _shown(administration, organization_id, key), "value": secret.value})


@router.delete("/{project_id}/api_keys/{key_id}")
async def delete_key(
    project_id: str,
    key_id: str,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    await administration.delete_key(actor, administrator.organization, project_id, key_id)
    return json({"object": "organization.project.api_key.deleted", "id": key_id, "deleted": True})


async def _shown(administration: Administration, organization_id: str, key: ApiKey) -> dict[str, object]:
    used = await administration.directory.last_used(organization_id, [key.id])
    return shown_key(key, used.get(key.id))
