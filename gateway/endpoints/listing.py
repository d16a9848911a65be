"""What lists and retrievals take from a URL's query, and the shape of a list.

Knows no noun.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request, Response

from noria.gateway.errors import InvalidRequest

MAX_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list, and in which order."""

    after: str | None
    before: str | None
    limit: int
    descending: bool


def page(
    request: Request,
    *,
    default_limit: int = 20,
    max_limit: int = MAX_LIMIT,
    default_order: str = "desc",
    only: Collection[str] | None = None,
) -> Page:
    """Raises `InvalidRequest` for values that mean nothing, and for parameters other than `only` these."""
    for name in request.query_params:
        if only is not None and name not in (*only, "api-version"):  # which Azure's clients send with everything
            raise InvalidRequest(f"Unknown query parameter: '{name[:64]}'.", param=name[:64], code="unknown_parameter")
    order = request.query_params.get("order", default_order)
    if order not in ("asc", "desc"):
        raise InvalidRequest("Invalid 'order': expected 'asc' or 'desc'.", param="order", code="invalid_value")
    limit = integer(request, "limit", default_limit)
    if not 0 <= limit <= max_limit:
        message = f"Invalid 'limit': expected a value between 1 and {max_limit}, but got {limit}."
        raise InvalidRequest(message, param="limit", code="invalid_value")
    after, before = request.query_params.get("after"), request.query_params.get("before")
    return Page(after or None, before or None, limit, order == "desc")


def unknown_cursor(after: str | None) -> InvalidRequest:
    """The error for an `after` that names nothing of this list."""
    return InvalidRequest(f"Invalid 'after': no object with id '{(after or '')[:128]}' is listed here.", param="after")


def integer(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.removeprefix("-").isdigit() or len(text) > 12:
        raise InvalidRequest(f"Invalid '{name}': expected an integer.", param=name, code="invalid_type")
    return int(text)


def flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"Invalid '{name}': expected true or false.", param=name, code="invalid_type")
    return text in ("true", "1")


def included(request: Request, known: Collection[str]) -> frozenset[str]:
    """The values of `include`, however a client spells a list. Raises `InvalidRequest` for one that is not known."""
    spelled = ("include", "include[]")
    values = frozenset(value for name, value in request.query_params.multi_items() if name in spelled)
    for value in values - set(known):
        message = f"Invalid 'include': {value[:64]!r} is not one of {', '.join(sorted(known))}."
        raise InvalidRequest(message, param="include", code="invalid_value")
    return values


def listed(data: Sequence[dict[str, Any]], *, more: bool) -> Response:
    """A list object; each element has an `id`."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json({"object": "list", "data": list(data), **ends, "has_more": more})


def json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
