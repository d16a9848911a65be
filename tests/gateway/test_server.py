"""The gateway process: start-up failures in one line, and a clean end that lets open streams finish."""

from __future__ import annotations

import json
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


def status_line(port, path="/readyz"):
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n\r\n".encode())
        answer = ""
        while "\r\n\r\n" not in answer or not answer.endswith("}"):
            answer += connection.recv(4096).decode().lower()
    return answer


def open_stream(client, answers, **fields):
    """A running stream in a thread, with a client of its own as long as the process lives."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 100, "stream": True, **fields}

    def post():
        with suppress(httpx.TransportError):
            answers.append(client.post("/v1/completions", json=body))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def test_a_draining_gateway_says_so_and_takes_nothing_new(store_url, engine, own_port, launch):
    engine.pace = 0.05
    process = start(own_port, store_url)
    launch.eventually(lambda: socket.socket().connect_ex(("127.0.0.1", own_port)) == 0, 20)
    client = httpx.Client(base_url=f"http://127.0.0.1:{own_port}", headers={"authorization": "Bearer k"}, timeout=20)
    launch.eventually(lambda: client.get("/readyz").status_code == 200)
    answers: list[httpx.Response] = []
    streaming = open_stream(client, answers)
    launch.eventually(lambda: engine.running)
    process.send_signal(signal.SIGTERM)
    launch.eventually(lambda: status_line(own_port).startswith("http/1.1 503"), 2)
    assert "shutting down" in status_line(own_port)
    assert status_line(own_port, "/healthz").startswith("http/1.1 200")
    refused = status_line(own_port, "/v1/models")
    assert refused.startswith("http/1.1 503") and "retry-after: 1" in refused and "connection: close" in refused
    assert '"code":"server_shutting_down"' in refused
    streaming.join(20)
    process.communicate(timeout=20)
    assert process.returncode == 0 and answers[0].text.strip().endswith("[DONE]")


def test_streams_cut_at_the_end_of_the_time_are_told(store_url, engine, own_port, launch):
    engine.pace = 0.1
    process = start(own_port, store_url, NORIA_GATEWAY_SHUTDOWN_TIMEOUT="1")
    launch.eventually(lambda: socket.socket().connect_ex(("127.0.0.1", own_port)) == 0, 20)
    client = httpx.Client(base_url=f"http://127.0.0.1:{own_port}", headers={"authorization": "Bearer k"}, timeout=20)
    launch.eventually(lambda: client.get("/readyz").status_code == 200)
    answers: list[httpx.Response] = []
    threads = [open_stream(client, answers, max_tokens=450, ignore_eos=True, stream=stream) for stream in (True, False)]
    launch.eventually(lambda: len(engine.running) == 2)
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(20)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in errors
    told = {answer.status_code: answer.text for answer in answers}
    assert '"code":"server_shutting_down"' in told[200].strip().split("\n\n")[-1] and "[DONE]" not in told[200]
    assert '"code":"server_shutting_down"' in told[503]
    launch.eventually(lambda: not engine.running, 5)


def test_a_resumable_stream_outlives_its_gateway(store_url, engine, own_port, launch):
    engine.pace = 0.1
    process = start(own_port, store_url, NORIA_GATEWAY_SHUTDOWN_TIMEOUT="1")
    other = launch.gateway(store_url, api_key="k")
    launch.eventually(lambda: socket.socket().connect_ex(("127.0.0.1", own_port)) == 0, 20)
    headers = {"authorization": "Bearer k", "x-noria-resumable": "true"}
    client = httpx.Client(base_url=f"http://127.0.0.1:{own_port}", headers=headers, timeout=20)
    launch.eventually(lambda: client.get("/readyz").status_code == 200)
    answers: list[httpx.Response] = []
    streaming = open_stream(client, answers)
    launch.eventually(lambda: engine.running)
    process.send_signal(signal.SIGTERM)
    streaming.join(20)
    process.communicate(timeout=20)
    first = answers[0].text
    assert '"code":"server_shutting_down"' in first
    last = [line[4:] for line in first.splitlines() if line.startswith("id: ")][-1]
    body = {"model": "tiny", "prompt": "a", "max_tokens": 100, "stream": True}
    with other.client(key="k") as second:
        rest = second.post("/v1/completions", json=body, headers={"last-event-id": last}).text
    chunks = [json.loads(line[6:]) for line in (first + rest).splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if "error" not in chunk)
    assert text == engine.answer and rest.strip().endswith("[DONE]")
    assert len(engine.seen) == 1 and not engine.cancelled


def test_a_second_signal_ends_it_at_once(store_url, engine, own_port, launch):
    engine.pace = 0.1
    process = start(own_port, store_url)
    launch.eventually(lambda: socket.socket().connect_ex(("127.0.0.1", own_port)) == 0, 20)
    client = httpx.Client(base_url=f"http://127.0.0.1:{own_port}", headers={"authorization": "Bearer k"}, timeout=20)
    launch.eventually(lambda: client.get("/readyz").status_code == 200)
    streaming = open_stream(client, [], max_tokens=450, ignore_eos=True)
    launch.eventually(lambda: engine.running)
    process.send_signal(signal.SIGTERM)
    launch.eventually(lambda: status_line(own_port).startswith("http/1.1 503"), 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 0
    streaming.join(10)
    launch.eventually(lambda: not engine.running, 5)


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
