"""What the admin API takes, and the shapes in which it shows organisations, projects, keys and changes.

Knows no store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from noria.gateway.schemas.strict import RequestBody
from noria.gateway.tenancy.given import GivenBudgets, GivenLimits, ModelName
from noria.gateway.tenancy.records import (
    AdminKey,
    Amount,
    ApiKey,
    Endpoints,
    Labels,
    Limits,
    Models,
    Name,
    Networks,
    Organization,
    Price,
    Project,
    Rates,
    Stored,
    Tiers,
)

MAX_GRACE = 30 * 86_400
_ID = r"^[A-Za-z0-9_.-]{1,64}$"


class OrganizationCreate(RequestBody):
    name: Name
    limits: GivenLimits = Limits()
    budgets: GivenBudgets = ()
    labels: Labels = Field(default_factory=dict)


class OrganizationUpdate(RequestBody):
    name: Name | None = None
    limits: GivenLimits | None = None
    budgets: GivenBudgets | None = None
    labels: Labels | None = None


class ProjectCreate(RequestBody):
    """An empty list of models or service tiers means all of them."""

    name: Name
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    cache_group: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    models: Models = ()
    service_tiers: Tiers = ()
    limits: GivenLimits = Limits()
    budgets: GivenBudgets = ()
    labels: Labels = Field(default_factory=dict)


class ProjectUpdate(RequestBody):
    name: Name | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    cache_group: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] | None = None
    models: Models | None = None
    service_tiers: Tiers | None = None
    limits: GivenLimits | None = None
    budgets: GivenBudgets | None = None
    labels: Labels | None = None


class ApiKeyCreate(RequestBody, Networks):
    """An empty list means: all. `expires_at` is in Unix seconds, 0: never."""

    name: Name
    expires_at: Annotated[int, Field(ge=0, le=10**11)] = 0
    models: Models = ()
    endpoints: Endpoints = ()
    service_tiers: Tiers = ()
    limits: GivenLimits = Limits()
    budgets: GivenBudgets = ()
    labels: Labels = Field(default_factory=dict)


class ApiKeyUpdate(RequestBody, Networks):
    name: Name | None = None
    expires_at: Annotated[int, Field(ge=0, le=10**11)] | None = None
    models: Models | None = None
    endpoints: Endpoints | None = None
    service_tiers: Tiers | None = None
    limits: GivenLimits | None = None
    budgets: GivenBudgets | None = None
    labels: Labels | None = None


class ApiKeyRotate(RequestBody):
    """For how long the secret before still opens."""

    grace_seconds: Annotated[int, Field(ge=0, le=MAX_GRACE)] = 0


class AdminKeyCreate(RequestBody):
    name: Name
    expires_at: Annotated[int, Field(ge=0, le=10**11)] = 0
    scope: Literal["organization", "instance"] = "organization"


class PricedModel(RequestBody):
    """What the path of a price names."""

    model: ModelName


class PriceSet(RequestBody, Price):
    """US dollars per million tokens."""


class ServiceAccountCreate(RequestBody):
    refused: ClassVar = {"create_service_account_only": "is not served: a service account here has a key"}

    name: Name
    expires_in_seconds: Annotated[int, Field(ge=1, le=10**10)] | None = None


class ServiceAccountUpdate(RequestBody):
    refused: ClassVar = {"role": "is not served: what its key may do is told by the key's own fields"}

    name: Name | None = None


class RateLimitUpdate(RequestBody):
    """Limits of one model."""

    refused: ClassVar = dict.fromkeys(
        ("batch_1_day_max_input_tokens", "max_audio_megabytes_per_1_minute", "max_images_per_1_minute"),
        "is not served: nothing of the kind is counted",
    )

    max_requests_per_1_minute: Amount | None = None
    max_tokens_per_1_minute: Amount | None = None
    max_requests_per_1_day: Amount | None = None


_RATES = {
    "max_requests_per_1_minute": "requests_per_minute",
    "max_tokens_per_1_minute": "tokens_per_minute",
    "max_requests_per_1_day": "requests_per_day",
}
RATE_LIMIT = "rl-"
"""How ids of rate limits begin; the rest is the model's."""

_ACCOUNT, _KEY = "svc_acct_", "key_"
_ALL_WHEN_EMPTY = ("models", "endpoints", "service_tiers")


def chosen(body: RequestBody) -> dict[str, Any]:
    """The fields that a client named, as the records have them."""
    given = {name: getattr(body, name) for name in body.model_fields_set}
    for name in _ALL_WHEN_EMPTY:
        if name in given and not given[name]:
            given[name] = None
    if given.get("expires_at") == 0:
        given["expires_at"] = None
    if "ip_allow_list" in given:
        given["ip_allow_list"] = tuple(given["ip_allow_list"])
    return given


def shown_organization(record: Organization) -> dict[str, Any]:
    return {"object": "organization", **_fields(record), "status": _status(record.archived_at)}


def shown_project(record: Project) -> dict[str, Any]:
    return {"object": "organization.project", **_fields(record), "status": _status(record.archived_at)}


def shown_key(record: ApiKey, last_used: int | None = None) -> dict[str, Any]:
    now, former = time.time(), record.former
    return {
        "object": "organization.project.api_key",
        **_fields(record, "former", "project"),
        "redacted_value": record.redacted,
        "project_id": record.project,
        "owner": {"type": "service_account", "service_account": shown_account(record)},
        "owner_project_access": "active",
        "status": "expired" if record.is_expired(now) else "active",
        "last_used_at": last_used,
        "grace_until": int(former.until) if former is not None and now < former.until else None,
    }


def shown_account(key: ApiKey) -> dict[str, Any]:
    """The service account that holds a project's key."""
    return {
        "object": "organization.project.service_account",
        "id": _ACCOUNT + key.id.removeprefix(_KEY),
        "name": key.name,
        "role": "member",
        "created_at": key.created_at,
    }


def shown_account_key(key: ApiKey, value: str) -> dict[str, Any]:
    return {
        "object": "organization.project.service_account.api_key",
        "id": key.id,
        "name": key.name,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "value": value,
    }


def key_of_account(account_id: str) -> str | None:
    """The id of its key; None: no service account has such an id."""
    return _KEY + account_id.removeprefix(_ACCOUNT) if account_id.startswith(_ACCOUNT) else None


def rates_of(body: RateLimitUpdate) -> dict[str, int]:
    """The limits that a client named, as the records have them."""
    return {_RATES[name]: getattr(body, name) for name in body.model_fields_set}


def shown_rate_limit(project: Project, model: str) -> dict[str, Any]:
    """Null: no limit."""
    rates = project.limits.models.get(model, Rates())
    shown = {name: getattr(rates, field) for name, field in _RATES.items()}
    return {"object": "project.rate_limit", "id": RATE_LIMIT + model, "model": model, **shown}


def shown_admin_key(record: AdminKey) -> dict[str, Any]:
    return {"object": "organization.admin_api_key", **_fields(record), "redacted_value": record.redacted}


def shown_change(entry_id: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's audit log object, with the records before and after the change."""
    actor, event = entry["actor"], entry["type"]
    who = {"type": actor["type"], actor["type"]: {"id": actor["id"]}, "ip_address": actor["address"]}
    changed = next(iter(entry["after"]), "")
    before, after = entry["before"].get(changed), entry["after"].get(changed)
    project = None if entry["project"] is None else {"id": entry["project"]}
    subject = {"id": (after or before or {}).get("id")}
    return {
        "id": entry_id,
        "object": "organization.audit_log",
        "type": event,
        "effective_at": entry["effective_at"],
        "actor": who,
        "project": project,
        event: subject,
        "before": before,
        "after": after,
    }


def _fields(record: Stored, *hidden: str) -> dict[str, Any]:
    fields = record.model_dump(mode="json", exclude={"digest", "redacted", *hidden})
    if "limits" in fields:
        fields["limits"] = record.model_dump(mode="json", include={"limits"}, exclude_none=True)["limits"]
    return fields


def _status(archived_at: int | None) -> str:
    return "active" if archived_at is None else "archived"
