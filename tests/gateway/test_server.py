"""The gateway process: start-up failures in one line, and a clean end that lets open streams finish."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import httpx

RUN = """
import sys
from noria.gateway.config import GatewaySettings
from noria.gateway.server import run
sys.exit(run(GatewaySettings()))
"""


def start(port, redis_url, **more):
    names = {"NORIA_GATEWAY_PORT": str(port), "NORIA_REDIS_URL": redis_url, "NORIA_API_KEY": "k", **more}
    return subprocess.Popen([sys.executable, "-c", RUN], env=os.environ | names, stderr=subprocess.PIPE, text=True)


def test_a_port_in_use_is_one_clear_line(own_port):
    with socket.create_server(("127.0.0.1", own_port)):
        process = start(own_port, "redis://127.0.0.1:1/0")
        _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert str(own_port) in errors and "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_bad_store_url_is_one_clear_line(own_port):
    process = start(own_port, "nonsense://user:secret@host")
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert len(errors.strip().splitlines()) == 1 and "secret" not in errors and "nonsense://" in errors


def test_sigterm_lets_an_open_stream_end(store_url, engine, own_port, launch):
    engine.pace = 0.03
    process = start(own_port, store_url)
    client = httpx.Client(base_url=f"http://127.0.0.1:{own_port}", headers={"authorization": "Bearer k"}, timeout=20)

    def ready():
        try:
            return client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    launch.eventually(ready, 20)
    answers = []
    body = {"model": "tiny", "prompt": "a", "max_tokens": 100, "stream": True}
    streaming = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
    streaming.start()
    launch.eventually(lambda: engine.running)
    process.send_signal(signal.SIGTERM)
    streaming.join(20)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in errors
    assert answers[0].text.strip().endswith("[DONE]")


def test_sigterm_does_not_wait_for_ever(store_url, engine, own_port, launch):
    engine.pace = 0.1
    process = start(own_port, store_url, NORIA_GATEWAY_SHUTDOWN_TIMEOUT="1")
    launch.eventually(lambda: socket.socket().connect_ex(("127.0.0.1", own_port)) == 0, 20)
    client = httpx.Client(base_url=f"http://127.0.0.1:{own_port}", headers={"authorization": "Bearer k"}, timeout=20)
    launch.eventually(lambda: client.get("/readyz").status_code == 200)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}

    def post():
        with suppress(httpx.TransportError):
            client.post("/v1/completions", json=body)

    streaming = threading.Thread(target=post)
    streaming.start()
    launch.eventually(lambda: engine.running)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    launch.eventually(lambda: not engine.running, 5)
    streaming.join(10)
