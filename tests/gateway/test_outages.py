"""The store or the engine goes away: quick and honest answers meanwhile, and no lost or doubled text after."""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def chat(client, **fields):
    return client.post("/v1/chat/completions", json={**HI, **fields})


def test_a_gateway_starts_without_its_store_and_serves_once_it_is_there(launch, own_port):
    url = f"redis://127.0.0.1:{own_port}/0"
    gateway = launch.gateway(url)
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/healthz").status_code == 200)
        began = time.monotonic()
        ready, refused = client.get("/readyz"), chat(client)
        assert time.monotonic() - began < 5
        assert ready.status_code == 503 and "store" in ready.json()["reason"]
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "server_is_overloaded"
        store = launch.store(own_port)
        launch.eventually(lambda: client.get("/readyz").json().get("reason") == "no engine serves a model")
        engine = launch.engine(url)
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        assert chat(client).json()["choices"][0]["message"]["content"] == engine.answer
        store.terminate()
        store.wait(10)
        began = time.monotonic()
        refused = chat(client)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert time.monotonic() - began < 5
        launch.store(own_port)  # it has forgotten everything
        launch.eventually(lambda: chat(client).status_code == 200, 15)


def test_a_dead_engine_is_a_pause_and_nothing_more(launch, own_port):
    url = f"redis://127.0.0.1:{own_port}/0"
    launch.store(own_port)
    first = launch.engine(url)
    first.pace = 0.03
    first._broker._lease = 1.0
    gateway = launch.gateway(url)
    result = {}
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        streaming = threading.Thread(target=lambda: result.update(answer=chat(client, max_tokens=40)))
        streaming.start()
        launch.eventually(lambda: first.generated > 5)
        first._broker.close = lambda: None  # dies without handing back
        first.stop()
        second = launch.engine(url)
        streaming.join(20)
        body = result["answer"].json()
        assert (
            body["choices"][0]["message"]["content"] == second.answer[: len(body["choices"][0]["message"]["content"])]
        )
        assert body["usage"]["completion_tokens"] == 40
        assert second.seen[0].delivered, "the second engine went on, it did not start again"
        launch.eventually(lambda: client.get("/readyz").status_code == 200)


def test_without_an_engine_a_known_model_is_a_503(launch, own_port):
    url = f"redis://127.0.0.1:{own_port}/0"
    launch.store(own_port)
    engine = launch.engine(url)
    gateway = launch.gateway(url)
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        engine.stop()
        launch.eventually(lambda: client.get("/readyz").status_code == 503)
        response = chat(client)
        assert response.status_code == 503 and response.headers["retry-after"]
        assert client.get("/v1/models").json()["data"] == []
        assert client.get("/v1/models/tiny").json()["status"] == "unavailable"
        assert client.post("/v1/completions", json={"model": "nope", "prompt": "a"}).status_code == 404


def test_a_request_has_a_longest_life(launch, own_port):
    url = f"redis://127.0.0.1:{own_port}/0"
    launch.store(own_port)
    engine = launch.engine(url)
    engine.pace = 0.1
    gateway = launch.gateway(url, request_timeout=1.0)
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        response = chat(client, ignore_eos=True, max_tokens=300)
        assert response.status_code == 408 and response.json()["error"]["code"] == "request_timeout"
        launch.eventually(lambda: not engine.running, 5)


def streamed_text(answer):
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if "choices" in chunk)


@pytest.mark.parametrize("resumable", [False, True])
def test_a_store_that_is_away_for_a_while(launch, own_port, resumable):
    """It does not refuse, it does not answer: the worst case. Nothing hangs, and open streams go on afterwards."""
    url = f"redis://127.0.0.1:{own_port}/0"
    store = launch.store(own_port)
    engine = launch.engine(url)
    engine.pace = 0.05
    gateway = launch.gateway(url)
    answers = []
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        client.headers["x-noria-resumable"] = str(resumable).lower()
        streaming = threading.Thread(target=lambda: answers.append(chat(client, stream=True).text))
        streaming.start()
        launch.eventually(lambda: engine.generated > 5)
        store.send_signal(signal.SIGSTOP)
        try:
            until, slowest, refused = time.monotonic() + 6, 0.0, []
            while time.monotonic() < until:
                began = time.monotonic()
                refused.append(chat(client, stream=True))
                slowest = max(slowest, time.monotonic() - began)
            began = time.monotonic()
            assert client.get("/readyz").status_code == 503
            assert time.monotonic() - began < 3
        finally:
            store.send_signal(signal.SIGCONT)
        assert {answer.status_code for answer in refused} == {503} and slowest < 3
        assert all(int(answer.headers["retry-after"]) >= 1 and answer.headers["retry-after-ms"] for answer in refused)
        assert len(refused) > 20, "once the store is known to be away, the refusal is immediate"
        streaming.join(20)
        assert streamed_text(answers[0]) == engine.answer and answers[0].strip().endswith("[DONE]")
        launch.eventually(lambda: chat(client, stream=True).status_code == 200)
