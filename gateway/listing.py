"""Query parameters of lists, and the shape of a page: the same for every kind of object.

Knows no kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noria.gateway.errors import InvalidRequest

_ANYWHERE = frozenset(("api-version",))
"""Sent with every request by clients for Azure."""


@dataclass(frozen=True, slots=True)
class PageQuery:
    limit: int
    after: str | None
    descending: bool


def page_query(
    query: Mapping[str, str], *, default: int, most: int, order: str | None, also: frozenset[str] = frozenset()
) -> PageQuery:
    """`order` is the default, or None where it cannot be chosen (then the newest come first); `also` are further
    parameters of the endpoint's own. Raises `InvalidRequest`."""
    known = {"limit", "after", *also} | ({"order"} if order else set())
    for name in query:
        if name not in known | _ANYWHERE:
            raise InvalidRequest(f"Unknown query parameter: '{name[:64]}'.", param=name[:64], code="unknown_parameter")
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        message = f"Invalid 'limit': expected an integer from 0 to {most}, but got {text[:32]!r}."
        raise InvalidRequest(message, param="limit", code="invalid_value")
    given = query.get("order", order or "desc")
    if given not in ("asc", "desc"):
        message = f"Invalid value for 'order': {given[:32]!r}. Supported values are: 'asc' and 'desc'."
        raise InvalidRequest(message, param="order", code="invalid_value")
    return PageQuery(int(text), query.get("after") or None, given == "desc")


def unknown_cursor(after: str | None) -> InvalidRequest:
    """The error for an `after` that names nothing of this list."""
    return InvalidRequest(f"Invalid 'after': no object with id '{(after or '')[:128]}' is listed here.", param="after")


def page(items: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }
