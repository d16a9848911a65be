"""/v1/organizations and /v1/organization: organisations made and changed; the admin keys, prices and changes of one.

Knows no store. Only admin keys come in here.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ActorDep, AdministrationDep, AdministratorDep, json_object
from noria.gateway.endpoints.listing import json, listed, page, unknown_cursor
from noria.gateway.errors import Forbidden, NotFound
from noria.gateway.schemas.administration import (
    AdminKeyCreate,
    OrganizationCreate,
    OrganizationUpdate,
    PricedModel,
    PriceSet,
    chosen,
    shown_admin_key,
    shown_change,
    shown_organization,
)
from noria.gateway.schemas.strict import parse
from noria.gateway.tenancy.principal import Administrator
from noria.gateway.tenancy.records import Price

router = APIRouter()


def paged(request: Request, rows: list[dict[str, Any]]) -> Response:
    """A page of a list that is read whole."""
    asked = page(request, only=("limit", "order", "after", "include_archived"), default_order="asc")
    if asked.descending:
        rows = rows[::-1]
    if asked.after is not None:
        places = [place for place, row in enumerate(rows) if row["id"] == asked.after]
        if not places:
            raise unknown_cursor(asked.after)
        rows = rows[places[0] + 1 :]
    return listed(rows[: asked.limit], more=len(rows) > asked.limit)


@router.get("/organizations")
async def list_organizations(
    request: Request, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    found = await administration.organizations()
    if not administrator.is_instance_wide:
        found = [organization for organization in found if organization.id == administrator.organization]
    return paged(request, [shown_organization(organization) for organization in found])


@router.post("/organizations")
async def create_organization(
    request: Request, administrator: AdministratorDep, administration: AdministrationDep, actor: ActorDep
) -> Response:
    _require_instance(administrator)
    body = parse(OrganizationCreate, await json_object(request))
    return json(shown_organization(await administration.create_organization(actor, chosen(body))))


@router.get("/organization")
async def retrieve_organization(administrator: AdministratorDep, administration: AdministrationDep) -> Response:
    return json(shown_organization(await administration.organization(administrator.organization)))


@router.post("/organization")
async def change_organization(
    request: Request, administrator: AdministratorDep, administration: AdministrationDep, actor: ActorDep
) -> Response:
    body = parse(OrganizationUpdate, await json_object(request))
    changed = await administration.change_organization(actor, administrator.organization, chosen(body))
    return json(shown_organization(changed))


@router.get("/organization/admin_api_keys")
async def list_admin_keys(
    request: Request, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    snapshot = await administration.directory.snapshot(administrator.organization)
    return paged(request, [shown_admin_key(key) for key in snapshot.admin_keys])


@router.post("/organization/admin_api_keys")
async def create_admin_key(
    request: Request, administrator: AdministratorDep, administration: AdministrationDep, actor: ActorDep
) -> Response:
    body = parse(AdminKeyCreate, await json_object(request))
    if body.scope == "instance":
        _require_instance(administrator)
    key, secret = await administration.create_admin_key(actor, administrator.organization, chosen(body))
    return json({**shown_admin_key(key), "value": secret.value})


@router.get("/organization/admin_api_keys/{key_id}")
async def retrieve_admin_key(
    key_id: str, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    snapshot = await administration.directory.snapshot(administrator.organization)
    for key in snapshot.admin_keys:
        if key.id == key_id:
            return json(shown_admin_key(key))
    raise NotFound(f"No admin API key found with id '{key_id[:128]}'.", param="key_id")


@router.delete("/organization/admin_api_keys/{key_id}")
async def delete_admin_key(
    key_id: str, administrator: AdministratorDep, administration: AdministrationDep, actor: ActorDep
) -> Response:
    await administration.delete_admin_key(actor, administrator.organization, key_id)
    return json({"id": key_id, "object": "organization.admin_api_key.deleted", "deleted": True})


@router.get("/organization/audit_logs")
async def list_audit_logs(
    request: Request, administrator: AdministratorDep, administration: AdministrationDep
) -> Response:
    asked = page(request, only=("limit", "after"))
    found = await administration.directory.audit(administrator.organization, after=asked.after, limit=asked.limit + 1)
    return listed([shown_change(*entry) for entry in found[: asked.limit]], more=len(found) > asked.limit)


@router.get("/organization/prices")
async def list_prices(administrator: AdministratorDep, administration: AdministrationDep) -> Response:
    prices = await administration.directory.prices()
    return listed([_shown_price(model, prices[model]) for model in sorted(prices)], more=False)


@router.post("/organization/prices/{model:path}")
async def set_price(
    model: str,
    request: Request,
    administrator: AdministratorDep,
    administration: AdministrationDep,
    actor: ActorDep,
) -> Response:
    _require_instance(administrator)
    parse(PricedModel, {"model": model})
    body = parse(PriceSet, await json_object(request))
    price = Price(input=body.input, cached_input=body.cached_input, output=body.output)
    await administration.set_price(actor, model, price)
    return json(_shown_price(model, price))


@router.delete("/organization/prices/{model:path}")
async def delete_price(
    model: str, administrator: AdministratorDep, administration: AdministrationDep, actor: ActorDep
) -> Response:
    _require_instance(administrator)
    await administration.set_price(actor, model, None)
    return json({"id": model, "object": "organization.price.deleted", "deleted": True})


def _shown_price(model: str, price: Price) -> dict[str, Any]:
    return {"object": "organization.price", "id": model, "model": model, "currency": "usd", **price.model_dump()}


def _require_instance(administrator: Administrator) -> None:
    if not administrator.is_instance_wide:
        message = "This needs an admin API key with the scope 'instance'."
        raise Forbidden(message, code="insufficient_permissions")
