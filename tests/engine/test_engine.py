"""The loop over a real store: real scheduler, executor and broker; only the model is a function of the tokens."""

from __future__ import annotations

import time
from array import array

import pytest

from noria.engine.wire.messages import Usage
from tests.engine.small_engine import BAD, BROKEN_LOGITS, EOS, Client, RunningEngine


async def test_requests_end_with_their_own_tokens(client: Client, engine: RunningEngine) -> None:
    for i in range(20):
        await client.send(f"r{i}", [10 * i], sampling={"max_tokens": 1 + i % 7})
    assert await client.ends(*(f"r{i}" for i in range(20))) == ["length"] * 20
    for i in range(20):
        assert client.tokens[f"r{i}"] == list(range(10 * i + 1, 10 * i + 2 + i % 7))
    engine.scheduler.check()


async def test_the_end_token_ends_and_is_counted(client: Client, engine: RunningEngine) -> None:
    await client.send("stop", [497], sampling={"max_tokens": 50})
    await client.send("stop id", [10], sampling={"max_tokens": 50, "stop_token_ids": (13,)})
    assert await client.ends("stop", "stop id") == ["stop", "stop"]
    assert client.tokens == {"stop": [498, 499, EOS], "stop id": [11, 12, 13]}
    usage = client.last["stop"].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (1, 3)


async def test_a_late_short_request_leaves_before_an_early_long_one(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.005
    await client.send("long", [10], sampling={"max_tokens": 200})
    await client.read(lambda: len(client.tokens.get("long", [])) > 5)
    await client.send("short", [300], sampling={"max_tokens": 5})
    await client.ends("short")
    assert "long" not in client.last
    await client.ends("long")
    assert max(engine.model.batch_sizes) == 2


async def test_a_priority_request_takes_a_slot_from_a_full_batch(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.01
    low = [f"low{i}" for i in range(8)]
    for i, name in enumerate(low):
        await client.send(name, [10 * i], sampling={"max_tokens": 100}, service_class="batch")
    await client.read(lambda: all(len(client.tokens.get(name, [])) > 3 for name in low))
    await client.send("same class", [400], service_class="batch")
    await client.send("urgent", [300], sampling={"max_tokens": 5}, service_class="priority")
    assert await client.ends("urgent") == ["length"]
    assert set(client.last) == {"urgent"} and "same class" not in client.tokens, "nobody else's end made room for it"
    assert await client.ends(*low, "same class") == ["length"] * 9
    for i, name in enumerate(low):
        assert client.tokens[name] == list(range(10 * i + 1, 10 * i + 101))
    stats = engine.engine.statistics.record()
    assert (stats.class_preemptions_total, stats.memory_preemptions_total) == (1, 0)
    assert stats.recomputed_tokens_total > 0


async def test_a_fault_ends_its_own_request_and_no_other(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.002
    for i in range(4):
        await client.send(f"good{i}", [10 * i], sampling={"max_tokens": 30})
    await client.read(lambda: len(client.tokens.get("good3", [])) > 3)
    await client.send("raises", [5, BAD, 7])
    await client.send("nan", [5, BROKEN_LOGITS, 7])
    assert await client.ends("raises", "nan") == ["error", "error"]
    assert client.last["raises"].error and client.last["nan"].error
    assert await client.ends(*(f"good{i}" for i in range(4))) == ["length"] * 4
    for i in range(4):
        assert client.tokens[f"good{i}"] == list(range(10 * i + 1, 10 * i + 31))
    engine.scheduler.check()


async def test_what_can_never_fit_is_told_and_harms_nobody(client: Client, engine: RunningEngine) -> None:
    await client.send("huge", [1] * 400, sampling={"max_tokens": 400})
    await client.send("fine", [1])
    assert await client.ends("huge", "fine") == ["error", "length"]
    assert "800" in (client.last["huge"].error or "") and "512" in (client.last["huge"].error or "")


async def test_cancel_frees_the_slot_at_the_next_iteration(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.01
    await client.send("long", [10], sampling={"max_tokens": 400, "ignore_eos": True})
    await client.read(lambda: len(client.tokens.get("long", [])) > 3)
    await client.broker.cancel("tiny", "long")
    assert await client.ends("long") == ["cancelled"]
    assert len(client.tokens["long"]) < 100
    assert engine.scheduler.kv.num_held == 0


async def test_a_deadline_ends_a_running_request(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.01
    deadline = int(time.time() * 1000) + 300
    await client.send("late", [10], sampling={"max_tokens": 400}, deadline_ms=deadline)
    assert await client.ends("late") == ["expired"]
    assert client.tokens["late"]


async def test_max_tokens_zero_computes_the_prompt_and_ends(client: Client, engine: RunningEngine) -> None:
    await client.send("zero", list(range(100)), sampling={"max_tokens": 0})
    assert await client.ends("zero") == ["length"]
    assert client.tokens["zero"] == []


@pytest.mark.parametrize("kind", ["mean", "last"])
async def test_a_vector_comes_with_the_end_beside_running_streams(
    client: Client, engine: RunningEngine, kind: str
) -> None:
    prompt = [7] * 150  # three chunks; the second time the blocks of all but the last tokens are known
    await client.send("stream", [10], sampling={"max_tokens": 40})
    for name in ("one", "two"):
        await client.send(name, prompt, pooling=kind, sampling={"max_tokens": 0})
        assert await client.ends(name) == ["stop"]
    assert await client.ends("stream") == ["length"] and client.last["stream"].embedding is None
    seen = [list(array("i", client.last[name].embedding or b"")) for name in ("one", "two")]
    # A mean is of every position, whatever the prefix cache holds; the last one may start behind it.
    assert seen == ([prompt, prompt] if kind == "mean" else [[7] * len(vector) for vector in seen])
    assert kind == "mean" or all(0 < len(vector) <= 64 for vector in seen)
    cached = [usage.cached_tokens for name in ("one", "two") if (usage := client.last[name].usage)]
    assert cached == ([0, 0] if kind == "mean" else [0, 144])
    assert client.tokens["one"] == [] and client.last["one"].usage.prompt_tokens == 150  # type: ignore[union-attr]
    engine.scheduler.check()


async def test_the_first_frame_tells_what_was_cached(client: Client, engine: RunningEngine) -> None:
    """Whoever stops reading before the end has to know it, too."""
    for name in ("one", "two"):
        await client.send(name, [7] * 150, sampling={"max_tokens": 3})
        assert await client.ends(name) == ["length"]
    assert client.first["one"].usage is None
    assert client.first["two"].usage == Usage(150, 1, 144) and client.last["two"].usage == Usage(150, 3, 144)


async def test_a_vector_that_cannot_be_computed_is_an_error(client: Client, engine: RunningEngine) -> None:
    await client.send("nan", [5, BROKEN_LOGITS, 7], pooling="mean", sampling={"max_tokens": 0})
    await client.send("kind", [5], pooling="cls", sampling={"max_tokens": 0})
    await client.send("fine", [5], pooling="mean", sampling={"max_tokens": 0})
    assert await client.ends("nan", "kind", "fine") == ["error", "error", "stop"]
    assert "cls" in (client.last["kind"].error or "")


async def test_gauges_fall_to_zero_when_idle(client: Client, engine: RunningEngine) -> None:
    await client.send("r", [10])
    await client.ends("r")
    until = time.monotonic() + 5
    while True:
        (status,) = await client.broker.models()
        (stats,) = status.engines.values()
        if stats.generation_tokens_total == 8 and stats.running == stats.batch_size == stats.kv_blocks_used == 0:
            break
        assert time.monotonic() < until, stats
        time.sleep(0.05)
    assert stats.prompt_tokens_total == 1 and stats.requests_finished_total == 1 and stats.iterations_total >= 8
    assert sum(stats.iteration_seconds) == sum(stats.iteration_rows) == stats.iterations_total
    assert stats.iteration_rows_sum >= 8 and 0 < stats.select_seconds_total < stats.iteration_seconds_sum
    assert stats.exchange_seconds_total > 0
