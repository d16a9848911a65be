"""Full queues, tenants and their weights, and what a waiting client may learn of its place."""

from __future__ import annotations

import threading
import time

import pytest

CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 45}


@pytest.fixture
def busy(launch, own_port):
    """A gateway with room for three waiting requests, two of one tenant; its engine takes no more than 16 at once."""
    launch.store(own_port)
    url = f"redis://127.0.0.1:{own_port}/0"
    engine = launch.engine(url)
    gateway = launch.gateway(url, api_key="sk-a,b*2.5@team=sk-b,c=sk-c", max_queued=3, max_queued_per_tenant=2)
    with gateway.client(key="sk-a") as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
    threads = []

    def send(key, headers=None, **fields):
        answer: list = []

        def post():
            with gateway.client(key=key) as client:
                answer.append(client.post(CHAT, json={**HI, **fields}, headers=headers))

        threads.append(threading.Thread(target=post))
        threads[-1].start()
        return answer

    def fill():
        """All of the engine's places, with requests that go on for long."""
        engine.pace = 0.05
        for count in range(1, 17):
            send("sk-a", ignore_eos=True, max_tokens=120)
            launch.eventually(lambda n=count: len(engine.seen) == n)
        launch.eventually(lambda: len(engine.running) == 16)

    yield engine, gateway, send, fill
    engine.pace = 0.0
    for thread in threads:
        thread.join(20)


def queued(gateway):
    with gateway.client(key="sk-a") as client:
        client.get("/readyz")
    (status,) = gateway.app.state.services.directory.models.values()
    return status.queued


def test_a_full_queue_is_429_for_its_tenant_and_503_for_all(busy, launch):
    engine, gateway, send, fill = busy
    fill()
    waiting = [send("sk-a"), send("sk-a")]
    launch.eventually(lambda: queued(gateway)["default"] == 2)
    for stream in (False, True):
        (refused,) = wait_for(send("sk-a", stream=stream), launch)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
        assert 1 <= int(refused.headers["retry-after"]) <= 72
        assert 0 < int(refused.headers["retry-after-ms"]) <= int(refused.headers["retry-after"]) * 1000
    waiting.append(send("sk-b"))
    launch.eventually(lambda: queued(gateway)["default"] == 3)
    (refused,) = wait_for(send("sk-c", stream=True), launch)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert int(refused.headers["retry-after"]) >= 1 and refused.headers["retry-after-ms"]
    engine.pace = 0.0
    for answer in waiting:
        assert wait_for(answer, launch)[0].status_code == 200


def wait_for(answer, launch):
    launch.eventually(lambda: answer, 20)
    return answer


def test_keys_name_tenants_and_weights(busy, launch):
    engine, _, send, _ = busy
    for key in ("sk-a", "sk-b", "sk-c"):
        assert wait_for(send(key, priority=7, service_tier="priority"), launch)[0].json()["service_tier"] == "priority"
    seen = [(r.tenant, r.weight, r.cache_group, r.priority, r.service_class) for r in (c.request for c in engine.seen)]
    assert seen == [
        ("default", 1.0, "", 7, "priority"), ("b", 2.5, "team", 7, "priority"), ("c", 1.0, "", 7, "priority"),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_the_place_in_the_queue_is_told_to_who_asks(busy, launch, stream):
    engine, gateway, send, fill = busy
    fill()
    ahead = send("sk-a")
    launch.eventually(lambda: queued(gateway)["default"] == 1)
    asked = send("sk-a", {"x-noria-queue-info": "true"}, stream=stream)
    launch.eventually(lambda: queued(gateway)["default"] == 2)
    time.sleep(2.2)  # two more comments
    engine.pace = 0.0
    answer = wait_for(asked, launch)[0]
    assert answer.status_code == 200 and answer.headers["x-noria-queue-position"] == "2"
    comments = [line for line in answer.text.splitlines() if line.startswith(":")]
    if stream:
        assert 2 <= len(comments) <= 6 and all(line.startswith(": queue position=") for line in comments)
        assert comments[0].startswith(": queue position=2")
    silent = wait_for(ahead, launch)[0]
    assert not [name for name in silent.headers if name.startswith("x-noria")]


def test_who_does_not_wait_is_told_zero_and_gets_no_comments(client, engine):
    headers = {"x-noria-queue-info": "true"}
    answer = client.post(CHAT, json={**HI, "stream": True}, headers=headers)
    assert answer.status_code == 200 and int(answer.headers["x-noria-queue-position"]) <= 1
    refused = client.post(CHAT, json=HI, headers={"x-noria-queue-info": "maybe"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Noria-Queue-Info")


@pytest.mark.parametrize(("asked", "used"), [(None, "default"), ("auto", "default"), ("flex", "flex")])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_the_tier_that_was_used_is_in_every_answer_and_chunk(client, engine, path, asked, used):
    body = HI if path == CHAT else {"model": "tiny", "prompt": "a"}
    body = body if asked is None else {**body, "service_tier": asked}
    assert client.post(path, json=body).json()["service_tier"] == used
    stream = client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
    chunks = [line for line in stream.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 2 and all(f'"service_tier":"{used}"' in chunk for chunk in chunks)
    assert {claimed.request.service_class for claimed in engine.seen} == {used}
