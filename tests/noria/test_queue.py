"""`noria queue` from outside, on a store that has a backlog, engines and dead letters."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.store import running_store
from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.messages import (
    EngineStats,
    GenerationRequest,
    ModelCard,
    SamplingParams,
    TokenizerFiles,
)

ROOT = Path(__file__).parents[2]
CARD = ModelCard("demo/model", (), 1, 512, 100, 1024, 16, (2,), False, "paged", "fp")


def noria(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
    env = {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "60", **variables}
    return subprocess.run(
        [sys.executable, "-m", "noria", *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_store() as store:
        engine = EngineBroker(store.url, CARD.id, engine_id="engine-one", lease_seconds=600)
        engine.register(CARD, TokenizerFiles("{}", None, None, None, False))
        asyncio.run(_fill(store.url))
        stats = EngineStats(running=1, kv_blocks_total=64, kv_blocks_used=16, draining=True)
        engine.exchange({}, stats, max_requests=1, max_blocks=64)
        yield store.url


async def _fill(url: str) -> None:
    """One poison request, then a backlog of two tenants."""
    gateway = GatewayBroker(url)
    await gateway.enqueue(_request("poison", "carol"), CARD)
    for number in range(2):
        victim = EngineBroker(url, CARD.id, engine_id=f"victim-{number}", lease_seconds=0.6)
        victim.register(CARD, TokenizerFiles("{}", None, None, None, False))
        assert victim.exchange({}, None, max_requests=1, max_blocks=64).claimed
        while not await _lapsed(gateway):
            await asyncio.sleep(0.05)
        await gateway.reap(CARD.id)
    for number in range(5):
        await gateway.enqueue(_request(f"a{number}", "alice"), CARD)
    await gateway.enqueue(_request("b0", "bob [x]", service_class="priority"), CARD)
    await gateway.close()


async def _lapsed(gateway: GatewayBroker) -> bool:
    """Whether no engine but the living one has a lease."""
    gateway._snapshots._until = 0.0
    (status,) = await gateway.models()
    return set(status.engines) == {"engine-one"}


def _request(request_id: str, tenant: str, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=16)
    return GenerationRequest(request_id, CARD.id, [1, 2, 3, 4], sampling, "gateway", tenant=tenant, **fields)


def test_what_waits_and_who_runs_it(url: str) -> None:
    done = noria("queue", "--redis-url", url)
    assert done.returncode == 0, done.stderr
    assert "demo/model" in done.stdout and "\x1b" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["alice", "5", "100"] in rows, done.stdout
    (engine,) = [row for row in rows if row and row[0] == "engine-one"]
    assert engine[-1] == "draining" and engine[-3:-1] == ["25", "%"] and 500 < float(engine[1]) <= 600


def test_as_json_and_from_the_environment(url: str) -> None:
    (pool,) = json.loads(noria("queue", "--json", NORIA_REDIS_URL=url).stdout)
    assert pool["model"] == "demo/model" and pool["depth"]["default"] == 5 and pool["dead_letters"] == 1
    assert pool["depth"]["priority"] == 0  # claimed first
    assert pool["tokens_queued"] == 100
    (engine,) = pool["engines"]
    assert (engine["engine"], engine["held"], engine["stats"]["kv_blocks_used"]) == ("engine-one", 1, 16)


def test_dead_letters_are_listed_shown_requeued_and_dropped(url: str) -> None:
    listed = noria("queue", "dead", "list", "--redis-url", url)
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("poison ")]
    assert "carol" in line
    shown = json.loads(noria("queue", "dead", "show", "poison", "--redis-url", url, "--json").stdout)
    assert shown["engines"] == ["victim-0", "victim-1"] and shown["prompt"] == [1, 2, 3, 4]
    assert "prompt" not in json.loads(noria("queue", "dead", "--redis-url", url, "--json").stdout)[0]
    done = noria("queue", "dead", "requeue", "poison", "--redis-url", url)
    assert (done.returncode, done.stdout) == (0, "poison waits again for demo/model\n")
    (pool,) = json.loads(noria("queue", "--json", "--redis-url", url).stdout)
    assert pool["depth"]["default"] == 6 and pool["dead_letters"] == 0
    again = noria("queue", "dead", "drop", "poison", "--redis-url", url)
    assert again.returncode == 1 and again.stderr == "noria: no dead letter has the id poison\n"


def test_a_store_that_is_away_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = noria("queue", "--redis-url", f"redis://user:hunter2@127.0.0.1:{port}/0")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in done.stderr and "hunter2" not in done.stderr


@pytest.mark.parametrize("words", [["dead", "show"], ["alive"], ["dead", "list", "x"]])
def test_words_that_mean_nothing(words: list[str]) -> None:
    done = noria("queue", *words, "--redis-url", "redis://127.0.0.1:1/0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "requeue ID" in done.stderr


def test_a_state_folder_without_a_store(tmp_path: Path) -> None:
    done = noria("queue", "--state-dir", str(tmp_path))
    assert done.returncode == 1 and "no store runs in the state folder" in done.stderr
