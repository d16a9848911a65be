"""The outermost ASGI layer: request ids, OpenAI's response headers, counting, and a 500 for whatever nobody foresaw.

While the gateway drains, nothing new but probes gets past here.

Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from functools import partial

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.engine.wire.tracing import Tracer
from noria.gateway.drain import Drain
from noria.gateway.errors import SHUTTING_DOWN, UNEXPECTED, ShuttingDown
from noria.gateway.http.addresses import settle
from noria.gateway.http.body import ClientGone
from noria.gateway.http.error_answers import ERROR_SHAPE, respond
from noria.gateway.messages import errors as anthropic
from noria.gateway.metrics import GatewayMetrics
from noria.gateway.tracing import TRACE, RequestTrace

log = structlog.get_logger(__name__)

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}\Z")
_PROBES = frozenset(("/health", "/healthz", "/readyz", "/metrics"))
_CLIENT_GONE = 499  # never sent: how a request that nobody waits for any more is counted and logged


class RequestContext:
    """Wraps the app. `addresses` says which spellings of a path mean the same."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, drain: Drain, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._app = app
        self._metrics = metrics
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        settle(scope)
        if scope["path"] in _PROBES:
            return await self._answer(scope, receive, send)
        self._drain.open += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._drain.open -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        began = time.perf_counter()
        request_id = _request_id(scope)
        status = _CLIENT_GONE
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        trace = None
        if self._tracer is not None and path not in _PROBES:
            trace = RequestTrace(scope)
            TRACE.set(trace)
        if anthropic.speaks(path):
            state[ERROR_SHAPE] = partial(anthropic.shaped, request_id=request_id.decode())

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                took = b"%d" % ((time.perf_counter() - began) * 1000)
                own = [
                    (b"x-request-id", request_id),
                    (b"openai-processing-ms", took),
                    (b"openai-version", b"2020-10-01"),
                ]
                if ERROR_SHAPE in state:
                    own.append((b"request-id", request_id))
                if organization := state.get("organization"):
                    own.append((b"openai-organization", organization.encode()))
                for name, value in scope.get("state", {}).get("answer_headers", {}).items():
                    own.append((name.encode(), value.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id.decode()):
            try:
                if self._drain.begun and path not in _PROBES:
                    return await respond(ShuttingDown(SHUTTING_DOWN), scope)(scope, receive, send_with_headers)
                await self._app(scope, receive, send_with_headers)
            except ClientGone:
                log.debug("the client left", path=path)
            except asyncio.CancelledError:  # the server stops, and its patience with open answers has ended
                log.warning("an answer was cut off by the end of the server", path=path)
                if status == _CLIENT_GONE:
                    await respond(ShuttingDown(SHUTTING_DOWN), scope)(scope, receive, send_with_headers)
            except Exception:
                log.exception("unexpected error", path=path)
                if status == _CLIENT_GONE:
                    await respond(UNEXPECTED, scope)(scope, receive, send_with_headers)
            finally:
                endpoint = getattr(scope.get("endpoint"), "__name__", "unmatched")
                self._metrics.requests.labels(endpoint, str(status)).inc()
                if trace is not None and self._tracer is not None:
                    trace.end(self._tracer, scope, request_id.decode(), status)
                log.debug("answered", path=path, status=status, seconds=round(time.perf_counter() - began, 4))


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.match(value):
            return bytes(value)
    return f"req_{secrets.token_hex(16)}".encode()
