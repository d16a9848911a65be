"""The engine's spans of a traced request, over the real loop and store."""

from __future__ import annotations

import time

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from noria.engine.spans import EngineSpans
from noria.engine.wire.tracing import SdkTracer, child_of
from tests.engine.small_engine import BAD, Client, RunningEngine


async def test_queue_prefill_and_decode_follow_each_other_beneath_the_gateways_span(client: Client, store: str) -> None:
    kept = InMemorySpanExporter()
    spans = EngineSpans(SdkTracer("engine", "e1", SimpleSpanProcessor(kept)), "tiny", "e1")
    engine = RunningEngine(store, spans=spans)
    parent, unsampled = child_of(None), child_of(None).traceparent[:-2] + "00"
    sent = int(time.time() * 1000)
    try:
        await client.send("traced", [10], sampling={"max_tokens": 5}, traceparent=parent.traceparent, sent_ms=sent)
        await client.send("other", [20])
        await client.send("unsampled", [30], traceparent=unsampled, sent_ms=sent)
        await client.send("broken", [5, BAD, 7], traceparent=parent.traceparent, sent_ms=sent)
        assert await client.ends("traced", "other", "unsampled", "broken") == ["length", "length", "length", "error"]
    finally:
        engine.stop()
    by_request: dict[str, list] = {}
    for span in kept.get_finished_spans():
        by_request.setdefault(str(span.attributes["noria.request.id"]), []).append(span)
    assert set(by_request) == {"traced", "broken"}
    queue, prefill, decode = by_request["traced"]
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert queue.start_time == sent * 1_000_000
    assert queue.end_time == prefill.start_time <= prefill.end_time == decode.start_time < decode.end_time
    for span in (queue, prefill, decode):
        assert (span.context.trace_id, span.parent.span_id) == (parent.trace_id, parent.span_id)
        assert span.resource.attributes["service.name"] == "noria-engine"
    assert prefill.attributes["gen_ai.usage.input_tokens"] == 1
    assert decode.attributes["gen_ai.usage.output_tokens"] == 5
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert [span.name for span in by_request["broken"]] == ["queue", "prefill"]
    assert not by_request["broken"][1].status.is_ok
