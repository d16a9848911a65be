"""A request's spans in the engine: waiting in the queue, prefill, decode; made when it ends.

Knows a claimed request and times; not what becomes of spans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from noria.engine.wire.messages import Claimed, TokenFrame
from noria.engine.wire.tracing import Attributes, SpanContext, Tracer, child_of, parse_traceparent


@dataclass(frozen=True, slots=True)
class EngineSpans:
    """One per engine. A request that moved has the spans of the engine that ended it."""

    tracer: Tracer
    model: str
    engine_id: str

    def of(self, claimed: Claimed) -> RequestSpans | None:
        """For a request that was claimed just now; None: nobody traces it."""
        parent = parse_traceparent(claimed.request.traceparent) if claimed.request.traceparent else None
        return None if parent is None or not parent.is_sampled else RequestSpans(self, claimed, parent)


class RequestSpans:
    """Of one request, from its claim on. Times are Unix nanoseconds."""

    def __init__(self, engine: EngineSpans, claimed: Claimed, parent: SpanContext) -> None:
        self._engine, self._parent = engine, parent
        self._claimed = time.time_ns()
        self._sent = min(claimed.request.sent_ms * 1_000_000 or self._claimed, self._claimed)
        self._first = 0
        self._common: dict[str, str | int] = {
            "gen_ai.request.model": engine.model,
            "noria.request.id": claimed.request.id,
            "noria.request.class": claimed.request.service_class,
            "noria.request.epoch": claimed.epoch,
            "noria.engine.id": engine.engine_id,
        }

    def published(self, frame: TokenFrame) -> None:
        """To be called with every frame; the last one makes the spans."""
        if frame.finish is None:
            self._first = self._first or time.time_ns()
            return
        now, usage = time.time_ns(), frame.usage
        first = self._first or now
        read = {"noria.usage.cached_tokens": usage.cached_tokens} if usage else {}
        written = {"gen_ai.usage.output_tokens": usage.completion_tokens} if usage else {}
        if usage:
            read["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        self._record("queue", self._sent, self._claimed, {})
        self._record("prefill", self._claimed, first, read, frame.error if not self._first else None)
        if self._first:
            reasons = {"gen_ai.response.finish_reasons": (frame.finish.value,)}
            self._record("decode", first, now, {**written, **reasons}, frame.error)

    def _record(self, name: str, begin: int, end: int, more: Attributes, error: str | None = None) -> None:
        context = child_of(self._parent)
        self._engine.tracer.record(name, context, self._parent, begin, end, {**self._common, **more}, error=error or "")
