"""Traces as a collector receives them: the gateway's span, and what engines are told to continue."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from noria.engine.wire.tracing import child_of, parse_traceparent

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Collector(HTTPServer):
    """Takes OTLP over HTTP. `spans` by name, each with its attributes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Export)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.spans: dict[str, Any] = {}
        self.services: set[str] = set()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}


class Export(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.take(self.rfile.read(int(self.headers["content-length"])))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {attribute.key: plain(attribute.value) for attribute in span.attributes}


def test_a_request_is_one_span_that_engines_continue(store_url, engine, launch, collector):
    gateway = launch.gateway(store_url, traces=collector.url)
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        body = {"model": "tiny-alias", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
        client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT, "x-request-id": "mine"})
        client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2})
        client.post("/v1/embeddings", json={"model": "nobody", "input": "a"})
        client.get("/v1/models", headers={"traceparent": PARENT.replace("-01", "-00")})
    gateway.stop()
    chat, completion = collector.spans["chat tiny"], collector.spans["text_completion tiny"]
    assert (chat.trace_id.hex(), chat.parent_span_id.hex()) == (TRACE, PARENT.split("-")[2])
    assert completion.trace_id.hex() != TRACE and completion.parent_span_id == b""
    told = attributes(chat)
    assert told.pop("noria.time_to_first_token") > 0
    assert told.pop("gen_ai.usage.input_tokens") > 3
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "noria.request.id": "mine",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "noria",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert chat.start_time_unix_nano < chat.end_time_unix_nano
    assert attributes(collector.spans["embeddings"])["http.response.status_code"] == 404
    assert "GET /v1/models" not in collector.spans  # the client does not want it recorded
    assert collector.services == {"noria-gateway"}
    continued = [parse_traceparent(claimed.request.traceparent) for claimed in engine.seen]
    assert [f"{c.span_id:016x}" for c in continued if c] == [chat.span_id.hex(), completion.span_id.hex()]


@pytest.mark.parametrize(
    "text",
    ["", "00", PARENT[:-1], PARENT.replace("00-", "ff-", 1), f"00-{'0' * 32}-b7ad6b7169203331-01", PARENT + "-x"],
)
def test_what_is_no_traceparent_begins_a_trace(text):
    assert parse_traceparent(text) is None
    fresh = child_of(None)
    assert parse_traceparent(fresh.traceparent) == fresh


def test_nothing_is_imported_where_nobody_asks(store_url):
    code = (
        "import sys; from noria.gateway.app import create_app; from noria.gateway.config import GatewaySettings;"
        "create_app(GatewaySettings()); sys.exit('opentelemetry.exporter' in sys.modules)"
    )  # redis-py imports some of the SDK by itself
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
