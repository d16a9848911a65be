"""What lists and retrievals take from a URL's query, and the shape of a list.

Knows no noun.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def page(request: Request, *, default_limit: int = 20, default_order: str = "desc") -> Page:
    """Raises `InvalidRequest` for values that mean nothing."""
    order = request.query_params.get("order", default_order)
    if order not in ("asc", "desc"):
        raise InvalidRequest("Invalid 'order': expected 'asc' or 'desc'.", param="order", code="invalid_value")
    limit = integer(request, "limit", default_limit)
    if not 0 <= limit <= MAX_LIMIT:
        message = f"Invalid 'limit': expected a value between 1 and {MAX_LIMIT}, but got {limit}."
        raise InvalidRequest(message, param="limit", code="invalid_value")
    after, before = request.query_params.get("after"), request.query_params.get("before")
    return Page(after or None, before or None, limit, order == "desc")


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


def listed(data: Sequence[dict[str, Any]], *, more: bool) -> Response:
    """A list object; each element has an `id`."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json({"object": "list", "data": list(data), **ends, "has_more": more})


def json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
