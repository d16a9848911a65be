"""Errors as Anthropic's clients expect them: its envelope, its types, its status for a server that is full.

Knows no HTTP and no endpoint.
"""

from __future__ import annotations

import orjson

from noria.gateway.errors import DeadlineExpired, GatewayError, Overloaded, RateLimited

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def speaks(path: str) -> bool:
    """Whether what lies there speaks this dialect."""
    first = path.removeprefix("/v1").split("/", 2)[1:2]
    return first == ["messages"]


def shaped(error: GatewayError, request_id: str) -> tuple[int, bytes]:
    """Status and body `{"type": "error", "error": {type, message}, "request_id"}`. The message says which field is
    meant, since nothing else here does."""
    status = error.status
    if isinstance(error, Overloaded) and not isinstance(error, RateLimited):
        status = 529
    elif isinstance(error, DeadlineExpired):
        status = 504
    told = error.message if not error.param or error.param in error.message else f"{error.param}: {error.message}"
    shown = {"type": _TYPES.get(status, "api_error"), "message": told}
    return status, orjson.dumps({"type": "error", "error": shown, "request_id": request_id})
