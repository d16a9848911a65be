"""OpenTelemetry, where it is asked for: spans that are made once a request is over, and sent by a thread of its own.

Lies on this floor because a request's spans come from gateway and engine. Knows no request; without an address nothing
of OpenTelemetry is imported.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Attributes = Mapping[str, str | int | float | tuple[str, ...]]

_PARENT = re.compile(r"00-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})\Z")
_SAMPLED = 1


class CannotTrace(ValueError):
    """Traces are asked for and OpenTelemetry is not installed."""


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The place of a span in a trace, as W3C's `traceparent` header carries it."""

    trace_id: int
    span_id: int
    flags: int = _SAMPLED

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)


def parse_traceparent(text: str) -> SpanContext | None:
    """None: it is none, or one of zeros, which the standard forbids."""
    found = _PARENT.match(text.strip())
    if found is None:
        return None
    context = SpanContext(int(found["trace"], 16), int(found["span"], 16), int(found["flags"], 16))
    return context if context.trace_id and context.span_id else None


def child_of(parent: SpanContext | None) -> SpanContext:
    """The place of a new span beneath `parent`, or at the root of a new trace. Whether it is recorded is the parent's
    word."""
    if parent is None:
        return SpanContext(secrets.randbits(128) or 1, secrets.randbits(64) or 1)
    return SpanContext(parent.trace_id, secrets.randbits(64) or 1, parent.flags)


class Tracer(Protocol):
    """Takes spans that are over. Times are Unix nanoseconds."""

    def record(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        begin: int,
        end: int,
        attributes: Attributes,
        *,
        kind: Literal["server", "internal"] = "internal",
        error: str = "",
    ) -> None: ...

    def close(self) -> None:
        """Send what is left."""


def open_tracer(role: str, address: str, instance: str) -> Tracer | None:
    """A tracer that sends to `address`, OTLP over HTTP; None without one. `role` is gateway or engine. What else
    OpenTelemetry's own variables set (OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, …) holds. Raises
    CannotTrace."""
    if not address:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise CannotTrace(f"traces need OpenTelemetry: install noria[otel] ({error.name} is missing)") from None
    return SdkTracer(role, instance, BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))


class SdkTracer:
    """Makes the SDK's own spans, whose ids were given out before they began, and hands them to a processor."""

    def __init__(self, role: str, instance: str, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._processor = processor
        self._scope = InstrumentationScope("noria")
        self._resource = Resource.create({"service.name": f"noria-{role}", "service.instance.id": instance})

    def record(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        begin: int,
        end: int,
        attributes: Attributes,
        *,
        kind: Literal["server", "internal"] = "internal",
        error: str = "",
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if not context.is_sampled:
            return
        span = ReadableSpan(
            name,
            context=_sdk_context(context, is_remote=False),
            parent=None if parent is None else _sdk_context(parent, is_remote=True),
            resource=self._resource,
            attributes=attributes,
            kind=SpanKind.SERVER if kind == "server" else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=begin,
            end_time=end,
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    def close(self) -> None:
        self._processor.shutdown()


def _sdk_context(context: SpanContext, *, is_remote: bool) -> Any:
    from opentelemetry.trace import SpanContext as Sdk
    from opentelemetry.trace import TraceFlags

    return Sdk(context.trace_id, context.span_id, is_remote, TraceFlags(context.flags))
