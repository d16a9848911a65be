"""A client that hangs up, streaming or not, frees its place in the engine at once."""

from __future__ import annotations

import json
import socket

import pytest

KEY = "sk-test-key"
REQUEST_HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n\r\n"


def send(gateway, **fields):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "ignore_eos": True,
        "max_tokens": 400,
        **fields,
    }
    data = json.dumps(body).encode()
    head = REQUEST_HEAD.format(KEY, len(data))
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_hanging_up_cancels_in_the_engine(gateway, engine, launch, stream, n):
    engine.pace = 0.05
    connection = send(gateway, stream=stream, n=n)
    launch.eventually(lambda: len(engine.running) == n)
    if stream:
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
    connection.close()
    launch.eventually(lambda: not engine.running, 3)
    assert len(engine.cancelled) == n
    assert not list(gateway.app.state.services.pump.sinks())


def test_hanging_up_while_queued_takes_the_request_out_of_the_queue(gateway, engine, launch, client):
    engine.pace = 0.05
    crowd = [send(gateway, stream=True) for _ in range(16)]  # all the places that the engine has
    launch.eventually(lambda: len(engine.running) == 16)
    engine.pace = 1.0
    waiting = send(gateway, stream=False)
    launch.eventually(lambda: len(list(gateway.app.state.services.pump.sinks())) == 17)
    waiting.close()
    launch.eventually(lambda: len(list(gateway.app.state.services.pump.sinks())) == 16)
    for connection in crowd:
        connection.close()
    engine.pace = 0.0
    launch.eventually(lambda: not engine.running)
    assert not list(gateway.app.state.services.pump.sinks())


def test_a_client_that_does_not_read_is_given_up(launch, store_url, engine):
    gateway = launch.gateway(store_url, max_stream_backlog=256)
    launch.eventually(lambda: gateway.app.state.services.directory.live())
    engine.pace = 0.0
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
    data = json.dumps({**body, "stream": True, "n": 16, "ignore_eos": True, "max_tokens": 480}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", gateway.port))
    head = REQUEST_HEAD.format(KEY, len(data))
    connection.sendall(head.encode() + data)
    launch.eventually(lambda: len(engine.cancelled) > 0, 15)
    connection.close()
    launch.eventually(lambda: not list(gateway.app.state.services.pump.sinks()))
