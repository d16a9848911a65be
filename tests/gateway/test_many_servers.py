"""A cluster, and a primary under Sentinels: every path works, and no accepted request is lost when a server dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from bench.servers import Servers, await_true, move_slots, primary_port, running_cluster, running_sentinels
from noria.engine.wire import keys
from noria.engine.wire.connection import BrokerUnavailable, Store
from noria.engine.wire.nodes import Nodes, parse_nodes
from noria.engine.wire.slots import by_slot

NUM_REQUESTS = 30


@pytest.fixture(scope="module", params=["cluster", "sentinel"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    with running_cluster() if request.param == "cluster" else running_sentinels() as running:
        yield running


class Client(threading.Thread):
    """Asks until it is let in, as OpenAI's clients do; what it was promised must come."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self._url, self._number = url, number
        self.text, self.trouble = "", ""
        self.ended = False

    def run(self) -> None:
        time.sleep(0.1 * self._number)
        body = {"model": "tiny", "prompt": f"request {self._number}", "max_tokens": 60, "stream": True}
        for _ in range(60):
            with (
                httpx.Client(headers={"authorization": "Bearer sk-test-key"}, timeout=90) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
            ):
                if answer.status_code == 503:
                    time.sleep(0.5)
                    continue
                self._read(answer)
                return

    def _read(self, answer: httpx.Response) -> None:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                self.ended = True
            elif line.startswith("data: "):
                event = httpx.Response(200, text=line[6:]).json()
                if "error" in event:
                    self.trouble = line
                else:
                    self.text += event["choices"][0]["text"]


def kill_the_one_with_the_pool(servers: Servers) -> None:
    """Under Sentinels for good; in the cluster it comes back with its file."""
    if "sentinel" in servers.url:
        old = servers.servers[0]
        old.kill()
        await_true(lambda: primary_port(servers.servers[2].port) != old.port)
        return
    nodes = parse_nodes(servers.url)
    assert nodes is not None
    with httpx.Client():
        holder = next(server for server in servers.servers if _has(server.port, keys.card("tiny")))
    holder.kill()
    time.sleep(1.0)
    holder.start()


def _has(port: int, key: str) -> bool:
    store = Store(f"redis://127.0.0.1:{port}")
    try:
        return bool(store.run(("EXISTS", key))[0])
    except BrokerUnavailable:  # MOVED: another has the slot
        return False
    finally:
        store.close()


def move_all_to_one_that_has_not_the_pool(servers: Servers) -> None:
    """Slot by slot; scripts of a slot that is half moved must change nothing."""
    target = next(server for server in servers.servers if not _has(server.port, keys.card("tiny")))
    for source in servers.servers:
        if source is not target:
            move_slots(source, target, servers.servers, half_way=0.3)
    assert _has(target.port, keys.card("tiny"))


def test_no_accepted_request_is_lost_when_a_server_dies(servers, launch):
    disturb(servers, launch, kill_the_one_with_the_pool)


@pytest.mark.parametrize("servers", ["cluster"], indirect=True)
def test_no_accepted_request_is_lost_when_slots_move(servers, launch):
    disturb(servers, launch, move_all_to_one_that_has_not_the_pool)


def disturb(servers: Servers, launch: Any, disturbance: Callable[[Servers], None]) -> None:
    """Every request of some clients is answered whole, though in the middle of them something happens."""
    engine = launch.engine(servers.url)
    engine.pace = 0.02
    gateways = [launch.gateway(servers.url) for _ in range(2)]
    assert engine.registered.wait(20)
    for gateway in gateways:
        with gateway.client() as client:
            launch.eventually(lambda client=client: client.get("/readyz").status_code == 200)
    clients = [Client(gateways[number % 2].url, number) for number in range(NUM_REQUESTS)]
    for client in clients:
        client.start()
    time.sleep(1.5)
    disturbance(servers)
    for client in clients:
        client.join(90)
    assert [(c.ended, c.text, c.trouble) for c in clients] == [(True, engine.answer, "")] * NUM_REQUESTS


def test_a_key_pool_batches_and_files_work_across_slots(servers, launch):
    engine = launch.engine(servers.url, id="other")
    gateway = launch.gateway(servers.url, key_pepper="p" * 32)
    assert engine.registered.wait(20)
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        kept = client.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"}).json()
        assert client.get(f"/v1/files/{kept['id']}/content").content == b"{}"
        body = {"model": "other", "input": "Hello", "store": True}
        response = client.post("/v1/responses", json=body).json()
        assert client.get(f"/v1/responses/{response['id']}").json()["status"] == "completed"
        headers = {"idempotency-key": "one"}
        body = {"model": "other", "prompt": "a", "max_tokens": 4}
        answers = [client.post("/v1/completions", json=body, headers=headers).json() for _ in range(2)]
        assert answers[0]["id"] == answers[1]["id"]


@pytest.mark.parametrize(
    ("url", "hosts", "name", "options"),
    [
        ("redis+sentinel://a,b:1/m", (("a", 26379), ("b", 1)), "m", {}),
        ("rediss+sentinel://u:p%40@[::1]:5/m/3", (("::1", 5),), "m", {"username": "u", "password": "p@", "db": 3}),
        ("redis+cluster://:p@a,b", (("a", 6379), ("b", 6379)), "", {"password": "p"}),
        ("redis+cluster://a?sentinel_password=x", (("a", 6379),), "", {}),
    ],
)
def test_addresses(url, hosts, name, options):
    nodes = parse_nodes(url)
    assert isinstance(nodes, Nodes)
    assert (nodes.hosts, nodes.name, nodes.options) == (hosts, name, options)
    assert nodes.is_tls == url.startswith("rediss")


@pytest.mark.parametrize(
    "url", ["redis+sentinel://a", "redis+cluster://a/1", "redis+ring://a", "redis+cluster://a:x", "redis+cluster://"]
)
def test_what_cannot_be_an_address_is_refused(url):
    with pytest.raises(ValueError, match=r"\w"):
        Store(url)


def test_commands_keep_their_order_and_what_has_no_key_goes_along():
    commands = [("SET", "{a}1", 1), ("GET", "{a}2"), ("WAITAOF", 1, 0, 1), ("GET", "{b}1"), ("GET", "{a}1")]
    assert [run for _, run in by_slot(commands)] == [commands[:3], commands[3:4], commands[4:]]
