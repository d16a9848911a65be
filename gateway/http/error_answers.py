"""The one place where an error becomes a response, whoever raised it: ours, the router's, the store's.

Knows no endpoint and no generation.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from noria.engine.wire.broker import BrokerUnavailable
from noria.engine.wire.record_store import RecordsFull
from noria.gateway.errors import (
    STORE_AWAY,
    GatewayError,
    InvalidRequest,
    Overloaded,
    StorageFull,
    UnknownAddress,
    WrongMethod,
    envelope,
)

ERROR_SHAPE = "error_shape"
"""In a scope's state: what makes an error's status and body, where the address speaks another dialect than OpenAI's."""


def respond(error: GatewayError, scope: Scope) -> Response:
    """The response of an error to the request of `scope`."""
    shape: Callable[[GatewayError], tuple[int, bytes]] | None = scope.get("state", {}).get(ERROR_SHAPE)
    status, body = (error.status, envelope(error)) if shape is None else shape(error)
    return Response(body, status, error.headers(), "application/json")


def install(app: FastAPI) -> None:
    """Make every error of `app` leave in the envelope: ours, the router's 404 and 405, and FastAPI's own 422."""

    @app.exception_handler(GatewayError)
    async def _ours(request: Request, error: GatewayError) -> Response:
        return respond(error, request.scope)

    @app.exception_handler(HTTPException)
    async def _routing(request: Request, error: HTTPException) -> Response:
        return respond(_routing_error(request, error), request.scope)

    @app.exception_handler(BrokerUnavailable)
    async def _store_away(request: Request, _: BrokerUnavailable) -> Response:
        return respond(Overloaded(STORE_AWAY, retry_after=2), request.scope)

    @app.exception_handler(RecordsFull)
    async def _full(request: Request, error: RecordsFull) -> Response:
        message = f"You have stored as much as is allowed ({error.limits.count} records, {error.limits.size} bytes)."
        return respond(StorageFull(f"{message} Please delete something first."), request.scope)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> Response:
        return respond(InvalidRequest(str(error.errors()[0].get("msg", "Invalid request."))), request.scope)


def _routing_error(request: Request, error: HTTPException) -> GatewayError:
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        return UnknownAddress(f"Unknown request URL: {method} {path}.")
    if error.status_code == 405:
        return WrongMethod(f"Not allowed to {method} on {path}.", (error.headers or {}).get("Allow", ""))
    return InvalidRequest("The request could not be processed.", code="invalid_request")
