"""/v1/admin over a real store: the wheel as a stream, queues with their engines, dead letters."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import msgspec
import pytest

from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.messages import GenerationRequest, SamplingParams
from noria.engine.wire.wheel import WheelChannel, WheelIteration, WheelNews, WheelRequest, WheelRow
from noria.gateway.wheel import MAX_WATCHERS
from tests.gateway.conftest import RunningGateway, ScriptedEngine, eventually

NEWS = WheelNews(
    "tiny", "engine-one", "paged", 8, 64, 16, 1.5,
    [WheelRequest("chatcmpl-1-0", "alice", "default", 5, 0, 10)],
    [WheelIteration(7, 1.25, 4000, 3, 2, [WheelRow(0, 0, "d", 1, 9, "stop")])],
)  # fmt: skip


@pytest.fixture
def channel(store_url: str) -> Iterator[WheelChannel]:
    made = WheelChannel(store_url, "tiny")
    yield made
    made.close()


@contextmanager
def watching(client: httpx.Client, path: str = "/v1/admin/wheel") -> Iterator[Iterator[str]]:
    with client.stream("GET", path) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield answer.iter_lines()


def test_the_wheel_is_passed_on_as_it_is(client, channel):
    with watching(client) as first, watching(client) as second:
        eventually(lambda: channel.publish(NEWS) == 1)  # one subscription, however many watch
        for lines in (first, second):
            data = next(line for line in lines if line.startswith("data: "))
            assert json.loads(data.removeprefix("data: ")) == msgspec.to_builtins(NEWS)
    eventually(lambda: channel.publish(NEWS) == 0)  # nobody watches: engines have nothing to tell


def test_a_quiet_wheel_keeps_the_connection_alive(client):
    with watching(client) as lines:
        assert next(lines).startswith(":")


def test_watchers_are_bounded(gateway: RunningGateway, client):
    feed = gateway.app.state.wheel
    crowd = [asyncio.Queue() for _ in range(MAX_WATCHERS)]
    feed._watchers.update(crowd)
    try:
        refused = client.get("/v1/admin/wheel")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    finally:
        feed._watchers.difference_update(crowd)


def test_a_drain_ends_the_stream(launch, store_url, channel):
    gateway = launch.gateway(store_url)
    with gateway.client() as client, watching(client) as lines:
        eventually(lambda: channel.publish(NEWS) == 1)
        gateway.app.state.services.drain.begun = True
        assert list(lines)  # and it ends


def test_queues_with_their_engines(client, engine: ScriptedEngine):
    (queue,) = [q for q in client.get("/v1/admin/queues").json()["data"] if q["id"] == "tiny"]
    assert queue["object"] == "queue" and set(queue["depth"]) == {"priority", "default", "flex", "batch"}
    (shown,) = queue["engines"]
    assert 0 < shown["lease_seconds"] <= 5 and shown["stats"]["kv_blocks_total"] == 99
    assert queue["dead_letters"] == 0 and queue["tenants"] == []


@pytest.fixture
def letter(store_url: str, engine: ScriptedEngine, client) -> str:
    """A request with which two engines died."""

    async def bury() -> None:
        broker = GatewayBroker(store_url)
        card = msgspec.structs.replace(engine.card, id="mortal", aliases=())
        request = GenerationRequest(
            "poison", "mortal", [1, 2, 3], SamplingParams(max_tokens=4), "gateway", tenant="carol"
        )
        await broker.enqueue(request, card)
        for number in range(2):
            victim = EngineBroker(store_url, "mortal", engine_id=f"victim-{number}", lease_seconds=0.2)
            victim.register(card, engine.files)
            assert victim.exchange({}, None, max_requests=1, max_blocks=64).claimed
            limit = time.monotonic() + 5
            while not await broker.reap("mortal") and number == 0 and time.monotonic() < limit:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.25)
        await broker.reap("mortal")
        await broker.close()

    if client.get("/v1/admin/dead_letters/poison").status_code == 404:
        asyncio.run(bury())
    return "poison"


def test_dead_letters_are_listed_shown_requeued_and_dropped(client, letter: str):
    (found,) = client.get("/v1/admin/dead_letters").json()["data"]
    assert (found["id"], found["model"], found["tenant"], found["attempts"]) == ("poison", "mortal", "carol", 2)
    assert "prompt" not in found
    assert client.get("/v1/admin/dead_letters/poison").json()["prompt"] == [1, 2, 3]
    assert client.post("/v1/admin/dead_letters/poison/requeue").json()["requeued"] is True
    (queue,) = [q for q in client.get("/v1/admin/queues").json()["data"] if q["id"] == "mortal"]
    assert queue["depth"]["default"] == 1 and queue["dead_letters"] == 0


def test_a_letter_is_dropped_for_good(client, store_url: str, letter: str):
    assert client.delete(f"/v1/admin/dead_letters/{letter}").json()["deleted"] is True
    gone = client.delete(f"/v1/admin/dead_letters/{letter}")
    assert gone.status_code == 404 and gone.json()["error"]["param"] == "letter_id"
    assert client.post(f"/v1/admin/dead_letters/{letter}/requeue").status_code == 404


@pytest.mark.parametrize("path", ["wheel", "queues", "dead_letters", "dead_letters/x"])
def test_nobody_looks_without_a_key(gateway: RunningGateway, path: str):
    with gateway.client(key=None) as client:
        assert client.get(f"/v1/admin/{path}").status_code == 401


def test_a_tenant_sees_nothing_of_the_others(launch, store_url: str):
    gateway = launch.gateway(store_url, api_key="alice=sk-alice,sk-operator")
    for key, status in (("sk-alice", 403), ("sk-operator", 200)):
        with gateway.client(key) as client:
            assert client.get("/v1/admin/dead_letters").status_code == status
