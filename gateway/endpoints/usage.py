"""/v1/organization/usage/completions and /v1/organization/costs, as OpenAI answers them, from the ledger's counts.

Knows no store. Only admin keys come in here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import AdministratorDep, ServicesDep
from noria.gateway.endpoints.listing import integer, json
from noria.gateway.errors import InvalidRequest
from noria.gateway.services import Services
from noria.gateway.tenancy.ledger import WIDTHS
from noria.gateway.tenancy.limits import NANO
from noria.gateway.tenancy.usage import Counts, Origin

router = APIRouter(prefix="/organization")

_MOST = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 180)}
"""Buckets on a page: by default and at most."""

_PARTS: Mapping[str, Callable[[Origin], str]] = {
    "project_id": lambda origin: origin.project,
    "api_key_id": lambda origin: origin.key,
    "model": lambda origin: origin.model,
    "line_item": lambda origin: origin.model,
    "service_tier": lambda origin: origin.service_class,
    "batch": lambda origin: str(origin.service_class == "batch"),
}
_FILTERS = {"project_ids": "project_id", "api_key_ids": "api_key_id", "models": "model"}


@dataclass(frozen=True, slots=True)
class _Asked:
    width: str
    starts: Sequence[int]  # of the buckets on this page, one more than it holds where there is a next one
    limit: int
    groups: Sequence[str]
    among: Callable[[Origin], bool]

    def by(self, origin: Origin) -> tuple[str, ...]:
        return tuple(_PARTS[group](origin) for group in self.groups)


@router.get("/usage/completions")
async def usage_completions(request: Request, services: ServicesDep, administrator: AdministratorDep) -> Response:
    asked = _read(request, tuple(WIDTHS), ("project_id", "api_key_id", "model", "batch", "service_tier"))

    def result(counts: Counts, told: Mapping[str, str]) -> dict[str, Any]:
        batch = told.get("batch")
        return {
            "object": "organization.usage.completions.result",
            "input_tokens": counts.input,
            "input_cached_tokens": counts.cached,
            "output_tokens": counts.output,
            "input_audio_tokens": 0,
            "output_audio_tokens": 0,
            "num_model_requests": counts.requests,
            "project_id": told.get("project_id"),
            "user_id": None,
            "api_key_id": told.get("api_key_id"),
            "model": told.get("model"),
            "batch": None if batch is None else batch == "True",
            "service_tier": told.get("service_tier"),
        }

    return await _page(services, administrator.organization, asked, result)


@router.get("/costs")
async def costs(request: Request, services: ServicesDep, administrator: AdministratorDep) -> Response:
    asked = _read(request, ("1d",), ("project_id", "line_item", "api_key_id"))

    def result(counts: Counts, told: Mapping[str, str]) -> dict[str, Any]:
        return {
            "object": "organization.costs.result",
            "amount": {"value": counts.cost / NANO, "currency": "usd"},
            "line_item": told.get("line_item"),
            "project_id": told.get("project_id"),
            "api_key_id": told.get("api_key_id"),
        }

    return await _page(services, administrator.organization, asked, result)


async def _page(
    services: Services,
    organization_id: str,
    asked: _Asked,
    result: Callable[[Counts, Mapping[str, str]], dict[str, Any]],
) -> Response:
    assert services.tenancy is not None  # an administrator was let in
    starts, more = asked.starts[: asked.limit], asked.starts[asked.limit :]
    found = await services.tenancy.usage.buckets(organization_id, asked.width, starts, among=asked.among, by=asked.by)
    data = [
        {
            "object": "bucket",
            "start_time": bucket.start,
            "end_time": bucket.end,
            "results": [result(c, dict(zip(asked.groups, of, strict=True))) for of, c in bucket.counts.items()],
        }
        for bucket in found
    ]
    return json({"object": "page", "data": data, "has_more": bool(more), "next_page": str(more[0]) if more else None})


def _read(request: Request, widths: Sequence[str], groups: Sequence[str]) -> _Asked:
    known = {"start_time", "end_time", "bucket_width", "limit", "page", "group_by", "batch", *_FILTERS}
    values: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        name = name.removesuffix("[]")
        if name not in known or (name == "batch" and "batch" not in groups):
            raise InvalidRequest(f"Unknown query parameter: '{name[:64]}'.", param=name[:64], code="unknown_parameter")
        values.setdefault(name, []).append(value)
    width = _one_of(values.get("bucket_width", ["1d"])[0], "bucket_width", widths)
    default, most = _MOST[width]
    limit = integer(request, "limit", default)
    if not 1 <= limit <= most:
        message = f"Invalid 'limit': expected a value between 1 and {most}, but got {limit}."
        raise InvalidRequest(message, param="limit", code="invalid_value")
    if "start_time" not in values:
        message = "Missing required parameter: 'start_time'."
        raise InvalidRequest(message, param="start_time", code="missing_required_parameter")
    start, length = integer(request, "start_time", 0), WIDTHS[width]
    first = integer(request, "page", start - start % length)
    end = min(integer(request, "end_time", int(time.time()) + 1), int(time.time()) + length)
    starts = range(first - first % length, end, length)[: limit + 1]
    wanted = [_one_of(group, "group_by", groups) for group in values.get("group_by", ())]
    return _Asked(width, starts, limit, tuple(dict.fromkeys(wanted)), _filter(values))


def _filter(values: Mapping[str, Sequence[str]]) -> Callable[[Origin], bool]:
    wanted = {part: set(values[name]) for name, part in _FILTERS.items() if name in values}
    if "batch" in values:
        wanted["batch"] = {_one_of(values["batch"][0].lower(), "batch", ("true", "false")).title()}
    return lambda origin: all(_PARTS[part](origin) in allowed for part, allowed in wanted.items())


def _one_of(value: str, param: str, known: Sequence[str]) -> str:
    if value not in known:
        message = f"Invalid '{param}': {value[:64]!r} is not one of {', '.join(known)}."
        raise InvalidRequest(message, param=param, code="invalid_value")
    return value
