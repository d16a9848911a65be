"""/v1/organization/projects/{id}/rate_limits: a project's limits for single models, in OpenAI's words.

Knows no store.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ActorDep, AdministrationDep, AdministratorDep, ServicesDep, json_object
from noria.gateway.endpoints.listing import json
from noria.gateway.endpoints.organizations import paged
from noria.gateway.errors import NotFound
from noria.gateway.schemas.administration import RATE_LIMIT, RateLimitUpdate, rates_of, shown_rate_limit
from noria.gateway.schemas.strict import parse
from noria.gateway.services import Services
from noria.gateway.tenancy.records import Project

router = APIRouter(prefix="/organization/projects/{project_id}/rate_limits")


@router.get("")
async def list_rate_limits(
    project_id: str,
    request: Request,
    services: ServicesDep,
    administrator: AdministratorDep,
    administration: AdministrationDep,
) -> Response:
    """Of every model that is served or limited."""
    project = await administration.project(administrator.organization, project_id)
    return paged(request, [shown_rate_limit(project, model) for model in _models(services, project)])


@router.post("/{rate_limit_id:path}")
async def change_rate_limit(
    project_id: str,
    rate_limit_id: str,
    request: Request,
    services: ServicesDep,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    """Limits that are not named stay as they are."""
    body = parse(RateLimitUpdate, await json_object(request))
    project = await administration.project(administrator.organization, project_id)
    model = rate_limit_id.removeprefix(RATE_LIMIT)
    if model == rate_limit_id or model not in _models(services, project):
        raise NotFound(f"No rate limit found with id '{rate_limit_id[:128]}'.", param="rate_limit_id")
    changed = await administration.limit_model(actor, administrator.organization, project_id, model, rates_of(body))
    return json(shown_rate_limit(changed, model))


def _models(services: Services, project: Project) -> list[str]:
    return sorted(set(services.directory.names()) | project.limits.models.keys())
