"""/v1/organization/projects/{id}/service_accounts: a project's keys by the name that OpenAI has for who holds them.

Each key of a project is that of one service account, which has its name and goes with it. Knows no store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ActorDep, AdministrationDep, AdministratorDep, json_object
from noria.gateway.endpoints.listing import json
from noria.gateway.endpoints.organizations import paged
from noria.gateway.errors import NotFound
from noria.gateway.schemas.administration import (
    ServiceAccountCreate,
    ServiceAccountUpdate,
    key_of_account,
    shown_account,
    shown_account_key,
)
from noria.gateway.schemas.strict import parse
from noria.gateway.tenancy.administration import Unknown

router = APIRouter(prefix="/organization/projects/{project_id}/service_accounts")


@router.get("")
async def list_service_accounts(
    project_id: str, request: Request, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    keys = await administration.keys(administrator.organization, project_id)
    return paged(request, [shown_account(key) for key in keys])


@router.post("")
async def create_service_account(
    project_id: str,
    request: Request,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    """Its key comes with it, shown this once."""
    body = parse(ServiceAccountCreate, await json_object(request))
    given: dict[str, Any] = {"name": body.name}
    if body.expires_in_seconds is not None:
        given["expires_at"] = int(time.time()) + body.expires_in_seconds
    key, secret = await administration.create_key(actor, administrator.organization, project_id, given)
    return json({**shown_account(key), "api_key": shown_account_key(key, secret.value)})


@router.get("/{account_id}")
async def retrieve_service_account(
    project_id: str, account_id: str, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    with _key(account_id) as key_id:
        return json(shown_account(await administration.key(administrator.organization, project_id, key_id)))


@router.post("/{account_id}")
async def change_service_account(
    project_id: str,
    account_id: str,
    request: Request,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    body = parse(ServiceAccountUpdate, await json_object(request))
    given = {} if body.name is None else {"name": body.name}
    with _key(account_id) as key_id:
        changed = await administration.change_key(actor, administrator.organization, project_id, key_id, given)
    return json(shown_account(changed))


@router.delete("/{account_id}")
async def delete_service_account(
    project_id: str,
    account_id: str,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    """Its key is revoked."""
    with _key(account_id) as key_id:
        await administration.delete_key(actor, administrator.organization, project_id, key_id)
    return json({"object": "organization.project.service_account.deleted", "id": account_id, "deleted": True})


@contextmanager
def _key(account_id: str) -> Iterator[str]:
    """The id of its key. Where no such key is found, it is the account that is not there."""
    key_id = key_of_account(account_id)
    missing = NotFound(f"No service account found with id '{account_id[:128]}'.", param="service_account_id")
    if key_id is None:
        raise missing
    try:
        yield key_id
    except Unknown as error:
        raise (missing if error.record_id == key_id else error) from None
