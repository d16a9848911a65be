"""Engines that die, drain or lose a gateway: what they held goes on elsewhere, or ends."""

from __future__ import annotations

import asyncio
from array import array

import pytest
import redis

from noria.engine.execution.executor import LocalExecutor
from noria.engine.wire.broker import GatewayBroker
from noria.engine.wire.messages import (
    GenerationRequest,
    SamplingParams,
)
from tests.engine.small_engine import CARD, Client, RunningEngine


async def test_another_engine_reads_a_pooled_prompt_from_its_start(client: Client, store: str) -> None:
    first = RunningEngine(store, lease_seconds=0.6)
    first.model.pace = 0.1
    prompt = list(range(400))
    await client.send("r", prompt, pooling="mean", sampling={"max_tokens": 0})
    while len(first.model.batch_sizes) < 3:
        await asyncio.sleep(0.01)
    first.halt()
    second = RunningEngine(store)
    try:
        while not await client.broker.reap("tiny"):
            await asyncio.sleep(0.05)
        assert await client.ends("r") == ["stop"]
        assert list(array("i", client.last["r"].embedding or b"")) == prompt
    finally:
        second.stop()
        first.broker.close()


async def test_another_engine_goes_on_where_one_died(client: Client, store: str) -> None:
    first = RunningEngine(store, lease_seconds=0.6)
    first.model.pace = 0.005
    for i in range(3):
        await client.send(f"r{i}", [100 * i], sampling={"max_tokens": 120})
    await client.read(lambda: len(client.tokens.get("r2", [])) > 10)
    first.halt()
    second = RunningEngine(store)
    try:
        reaped = 0
        while reaped < 3:
            reaped += await client.broker.reap("tiny")
        assert await client.ends("r0", "r1", "r2") == ["length"] * 3
        for i in range(3):
            assert client.tokens[f"r{i}"] == list(range(100 * i + 1, 100 * i + 121))
    finally:
        second.stop()
        first.broker.close()


async def test_stopping_hands_back_what_is_unfinished(client: Client, store: str) -> None:
    first = RunningEngine(store)
    first.model.pace = 0.005
    await client.send("r", [10], sampling={"max_tokens": 150})
    await client.read(lambda: len(client.tokens.get("r", [])) > 10)
    first.stop()
    second = RunningEngine(store)
    try:
        assert await client.ends("r") == ["length"]
        assert client.tokens["r"] == list(range(11, 161))
    finally:
        second.stop()


class DeepExecutor(LocalExecutor):
    """Two iterations out at once, as with two pipeline stages."""

    depth = 2


async def test_draining_claims_nothing_and_finishes_what_runs(client: Client, store: str) -> None:
    first = RunningEngine(store)
    first.model.pace = 0.01
    await client.send("running", [10], sampling={"max_tokens": 60})
    await client.read(lambda: len(client.tokens.get("running", [])) > 5)
    first.drain(20)
    await client.send("late", [300], sampling={"max_tokens": 5})
    assert await client.ends("running") == ["length"]
    first.join()
    assert "late" not in client.tokens and first.engine.num_held == 0
    first.broker.close()
    second = RunningEngine(store)
    try:
        assert await client.ends("late") == ["length"]
    finally:
        second.stop()
    assert client.tokens["running"] == list(range(11, 71))


async def test_what_outlives_the_drain_goes_on_elsewhere(client: Client, store: str) -> None:
    first = RunningEngine(store)
    first.model.pace = 0.01
    await client.send("r", [10], sampling={"max_tokens": 150})
    await client.read(lambda: len(client.tokens.get("r", [])) > 5)
    first.drain(0.2)
    first.join()
    assert first.engine.num_held == 1
    first.broker.close()
    second = RunningEngine(store)
    try:
        assert await client.ends("r") == ["length"]
        assert client.tokens["r"] == list(range(11, 161))
    finally:
        second.stop()
    assert redis.Redis.from_url(store).xlen("noria:{tiny}:dead") == 0


async def test_a_second_signal_cuts_the_drain_short(client: Client, store: str) -> None:
    first = RunningEngine(store)
    first.model.pace = 0.01
    await client.send("r", [10], sampling={"max_tokens": 400, "ignore_eos": True})
    await client.read(lambda: len(client.tokens.get("r", [])) > 5)
    first.drain(60)
    await client.read(lambda: len(client.tokens["r"]) > 20)
    first.hurry.set()
    first.join()
    assert first.engine.num_held == 1 and "r" not in client.last
    first.broker.close()


@pytest.mark.parametrize("policy", ["paged", "static"])
async def test_a_request_that_comes_back_while_its_old_row_is_out(client: Client, store: str, policy: str) -> None:
    """The engine loses its lease with two iterations out, and gets the same requests again."""
    running = RunningEngine(store, executor=DeepExecutor, policy=policy)
    running.model.pace = 0.01
    try:
        await client.send("short", [300], sampling={"max_tokens": 10})
        await client.send("long", [10], sampling={"max_tokens": 200})
        await client.read(lambda: len(client.tokens.get("long", [])) > 15)
        direct = redis.Redis.from_url(store)
        for _ in range(3):
            known = len(client.tokens["long"])
            for key in direct.keys("noria:{tiny}:request:*"):
                direct.hset(key, "attempts", 0)  # else the second death would be the last
            direct.zadd("noria:{tiny}:engines", {running.broker.engine_id: 1})
            await client.broker.reap("tiny")
            await client.read(lambda known=known: len(client.tokens["long"]) > known + 10)  # type: ignore[misc]
        assert await client.ends("long", "short") == ["length", "length"]
        assert client.tokens == {"long": list(range(11, 211)), "short": list(range(301, 311))}
        running.scheduler.check()
        assert not running.engine._live and running.scheduler.kv.num_held == 0
    finally:
        running.stop()


async def test_requests_of_a_dead_gateway_do_not_hold_up_the_living(client: Client, store: str) -> None:
    dead = GatewayBroker(store)
    await dead.start()
    ghosts = [
        GenerationRequest(f"ghost{i}", "tiny", [10], SamplingParams(max_tokens=400, ignore_eos=True), dead.boot_id)
        for i in range(40)
    ]
    for ghost in ghosts:
        await dead.enqueue(ghost, CARD)
    await dead.close()
    redis.Redis.from_url(store).delete(f"noria:frames:{dead.boot_id}")
    running = RunningEngine(store)
    running.model.pace = 0.02
    try:
        await client.send("living", [10])
        async with asyncio.timeout(15):
            assert await client.ends("living") == ["length"]
        # Eight ghosts were computed until the first of them told that nobody listens, the rest never.
        assert sum(running.model.batch_sizes) < 8 * 3.5 / 0.02
    finally:
        running.stop()
