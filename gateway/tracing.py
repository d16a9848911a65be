"""The span of one HTTP request, with OpenTelemetry's names for generative AI; where traces are asked for.

Knows what endpoints do by their names; nothing of what becomes of spans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from noria.engine.wire.messages import Usage
from noria.engine.wire.tracing import SpanContext, Tracer, child_of, parse_traceparent

Scope = Mapping[str, Any]
"""ASGI's."""

_OPERATIONS = {
    "chat_completions": "chat",
    "create_response": "chat",
    "create_message": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""`gen_ai.operation.name` by endpoint; others have none."""


class RequestTrace:
    """From the request's first byte to its answer's last. Its place in the trace is the client's `traceparent`, or the
    root of a new one."""

    def __init__(self, scope: Scope) -> None:
        given = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        self._parent: SpanContext | None = parse_traceparent(given.decode("latin-1"))
        self._context = child_of(self._parent)
        self._begin = time.time_ns()
        self._first = 0
        self._attributes: dict[str, str | int | float | tuple[str, ...]] = {}
        self._reasons: list[str] = []

    @property
    def traceparent(self) -> str:
        """What the spans of an engine are children of."""
        return self._context.traceparent

    def first_token(self) -> None:
        self._first = self._first or time.time_ns()

    def finished(self, reason: str) -> None:
        """One choice has ended."""
        self._reasons.append(reason)

    def used(self, model: str, usage: Usage) -> None:
        """What an answer came to."""
        self._attributes |= {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }

    def end(self, tracer: Tracer, scope: Scope, request_id: str, status: int) -> None:
        endpoint = getattr(scope.get("endpoint"), "__name__", "")
        route = getattr(scope.get("route"), "path", "")
        if scope["path"].startswith("/v1/") and not route.startswith("/v1/"):
            route = f"/v1{route}"  # routers know their own part of a path
        own: dict[str, str | int | float | tuple[str, ...]] = {
            "http.request.method": scope["method"],
            "http.route": route,
            "http.response.status_code": status,
            "noria.request.id": request_id,
        }
        operation = _OPERATIONS.get(endpoint, "")
        name = f"{scope['method']} {route}".strip()
        if operation:
            own |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "noria"}
            name = f"{operation} {self._attributes.get('gen_ai.request.model', '')}".strip()
        if self._reasons:
            own["gen_ai.response.finish_reasons"] = tuple(self._reasons)
        if self._first:
            own["noria.time_to_first_token"] = (self._first - self._begin) / 1e9
        error = f"HTTP {status}" if status >= 500 else ""
        attributes = own | self._attributes
        now = time.time_ns()
        tracer.record(name, self._context, self._parent, self._begin, now, attributes, kind="server", error=error)


TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
"""Of the request that is being answered; None: nobody asks for traces."""


def trace_fields() -> tuple[str, int]:
    """`traceparent` and `sent_ms` for a request that goes on the queue now."""
    trace = TRACE.get()
    return ("", 0) if trace is None else (trace.traceparent, time.time_ns() // 1_000_000)
