"""Bodies made to hold up everybody else: refused in a moment, whatever their size."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from noria.gateway.errors import InvalidRequest
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.completions import CompletionRequest
from noria.gateway.schemas.strict import parse

MANY = 500_000
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"messages": [0] * MANY}, "messages[0]"),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}, "messages[0].content[0]"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "x", **{f"k{i}": 1 for i in range(MANY)}}]},
            "messages[0]",
        ),
        (ChatRequest, {"messages": HELLO, **{f"k{i}": 1 for i in range(MANY)}}, None),
        (ChatRequest, {"messages": HELLO, "logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias"),
        (ChatRequest, {"messages": HELLO, "metadata": {str(i): 1 for i in range(MANY)}}, "metadata"),
        (ChatRequest, {"messages": HELLO, "stop": [1] * MANY}, "stop"),
        (ChatRequest, {"messages": HELLO, "stop_token_ids": ["x"] * MANY}, "stop_token_ids"),
        (ChatRequest, {"messages": HELLO, "modalities": [1] * MANY}, "modalities"),
        (ChatRequest, {"messages": HELLO, "chat_template_kwargs": {"a": ["x"] * MANY}}, "chat_template_kwargs"),
        (CompletionRequest, {"prompt": [1, "x"] * MANY}, "prompt"),
        (CompletionRequest, {"prompt": [[1.5]] * MANY}, "prompt"),
    ],
)
def test_a_flood_of_faults_costs_no_more_than_the_first(kind: Any, fields: dict[str, Any], param: str | None) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest) as refused:
        parse(kind, {"model": "m", **fields})
    assert time.thread_time() - started < 1.0
    assert param is None or refused.value.param == param
    assert len(refused.value.message) < 500


@pytest.mark.parametrize("name", ["tokenizer", "template", "self", "protect", "range", "raise_exception", "messages"])
def test_template_variables_cannot_take_a_name_of_ours(client: Any, name: str) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 2, "chat_template_kwargs": {name: "x"}}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code in (200, 400), answer.text
    if name in ("range", "raise_exception", "messages"):
        assert answer.status_code == 400


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


@pytest.mark.parametrize("spell", [str, str.upper, str.lower])
def test_an_offer_of_http2_leaves_the_body_alone(gateway: Any, client: Any, spell: Callable[[str], str]) -> None:
    body = b'{"model": "tiny", "prompt": "Hi", "max_tokens": 2}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{spell('Connection')}: Upgrade, HTTP2-Settings, close\r\n"
        f"{spell('Upgrade')}: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
        f"Authorization: {client.headers['authorization']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    assert raw(gateway.port, head.encode() + body).startswith(b"HTTP/1.1 200")


def test_json_that_is_nested_without_end_is_refused_at_once(client: Any) -> None:
    for depth, opening, closing in ((10_000, "[", "]"), (1_000_000, "[", "]"), (10_000, '{"a":', "}")):
        body = '{"model": "tiny", "messages": ' + opening * depth + "1" + closing * depth + "}"
        began = time.monotonic()
        answer = client.post("/v1/chat/completions", content=body.encode())
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
        assert time.monotonic() - began < 5


def test_a_body_that_never_ends_is_cut_off_and_holds_up_nobody(launch: Any, store_url: str, engine: Any) -> None:
    gateway = launch.gateway(store_url, body_timeout=0.5)
    with gateway.client() as client, socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as slow:
        key = client.headers["authorization"]
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
            b"Authorization: " + key.encode() + b'\r\n\r\n{"model"'
        )
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2}).status_code == 200
        assert slow.recv(64).startswith(b"HTTP/1.1 408")
