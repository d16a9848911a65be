"""The engine's own pages, beside an engine that runs, that is slow, stuck, cut off, and that drains."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.store import Store, running_store
from noria.engine.server import _find_store
from noria.engine.status import StatusPages
from noria.engine.wire.broker import BrokerUnavailable, EngineBroker
from tests.engine.small_engine import Client, RunningEngine

STUCK_AFTER = 0.8


@pytest.fixture
def pages() -> Iterator[StatusPages]:
    found = StatusPages("127.0.0.1", 0, STUCK_AFTER, vllm_names=True)
    yield found
    found.close()


def ask(pages: StatusPages, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{pages.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def said(pages: StatusPages, path: str) -> tuple[int, Any]:
    code, text = ask(pages, path)
    return code, json.loads(text)["status"]


def eventually(condition: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_model_that_loads_is_alive_and_not_ready(pages: StatusPages) -> None:
    assert said(pages, "/livez") == (200, "loading")
    assert said(pages, "/readyz") == (503, "loading")
    assert "noria_build_info" in ask(pages, "/metrics")[1]
    assert ask(pages, "/v1/models")[0] == 404


async def test_a_long_iteration_is_alive_and_a_stuck_one_is_not(
    pages: StatusPages, engine: RunningEngine, client: Client
) -> None:
    pages.watch(engine.engine, "tiny", "e1")
    eventually(lambda: said(pages, "/readyz") == (200, "ready"))
    engine.model.pace = STUCK_AFTER / 2
    await client.send("slow", [1], sampling={"max_tokens": 3})
    codes = []
    while not codes or engine.engine.num_held:
        codes.append(ask(pages, "/livez")[0])
        time.sleep(0.05)
    assert set(codes) == {200} and len(codes) > 10
    engine.model.pace = STUCK_AFTER * 3
    await client.send("stuck", [1], sampling={"max_tokens": 1})
    eventually(lambda: said(pages, "/livez") == (503, "stuck"))
    assert said(pages, "/readyz") == (503, "stuck")
    eventually(lambda: ask(pages, "/livez")[0] == 200)  # it turns again


async def test_figures_are_those_of_the_engine_under_both_names(
    pages: StatusPages, engine: RunningEngine, client: Client
) -> None:
    pages.watch(engine.engine, "tiny", "e1")
    await client.send("a", [1, 2, 3], sampling={"max_tokens": 5})
    await client.ends("a")

    def figures() -> dict[str, float]:
        families = text_string_to_metric_families(ask(pages, "/metrics")[1])
        return {sample.name: sample.value for family in families for sample in family.samples}

    eventually(lambda: figures().get("noria_engine_generation_tokens_total") == 5)
    found = figures()
    assert found["vllm:generation_tokens_total"] == 5 and found["vllm:prompt_tokens_total"] == 3
    assert 'vllm:num_requests_running{engine="e1",model_name="tiny"}' in ask(pages, "/metrics")[1]
    assert found["process_resident_memory_bytes"] > 1e6


def test_who_drains_is_not_ready(pages: StatusPages, engine: RunningEngine) -> None:
    pages.watch(engine.engine, "tiny", "e1")
    engine.engine.statistics.draining = True
    assert said(pages, "/readyz") == (503, "draining")
    assert ask(pages, "/livez")[0] == 200


def test_without_the_store_it_is_alive_and_not_ready(pages: StatusPages) -> None:
    with running_store() as store:
        running = RunningEngine(store.url)
        pages.watch(running.engine, "tiny", "e1")
        eventually(lambda: said(pages, "/readyz") == (200, "ready"))
        store.stop()
        eventually(lambda: said(pages, "/readyz") == (503, "the store does not answer"))
        assert ask(pages, "/livez")[0] == 200
        store.start()
        eventually(lambda: said(pages, "/readyz") == (200, "ready"))
        running.stop()


def test_a_start_waits_for_its_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_store() as store:
        store.stop()
        broker = EngineBroker(store.url, "tiny")
        with pytest.raises(BrokerUnavailable):
            _find_store(broker, 0.0, threading.Event())
        late = threading.Timer(0.7, store.start)
        late.start()
        _find_store(broker, 20.0, threading.Event())
        late.join()
        assert isinstance(store, Store) and store.client.ping()
        broker.close()
