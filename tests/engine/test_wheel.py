"""The wheel as watchers see it, published by a real engine through a real store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from statistics import median
from time import perf_counter

import msgspec
import pytest

from noria.engine.live import LiveRequest
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.trace import Times
from noria.engine.wheel import Wheel
from noria.engine.wire.messages import Claimed, GenerationRequest, SamplingParams
from noria.engine.wire.wheel import WheelChannel, WheelNews, WheelSubscription
from tests.engine.small_engine import CARD, Client, RunningEngine

BARE = WheelNews("tiny", "engine-one", "paged", 8, 64, 16, 0.0, [], [])


@pytest.fixture
def wheel(store: str) -> Iterator[Wheel]:
    made = Wheel(WheelChannel(store, "tiny"), BARE)
    yield made
    made.close()


@pytest.fixture
def turning(client: Client, store: str, wheel: Wheel) -> Iterator[RunningEngine]:
    engine = RunningEngine(store, wheel=wheel)
    engine.model.pace = 0.004
    yield engine
    engine.stop()


class Watcher:
    """All that was heard, request ids in the place of their numbers."""

    def __init__(self) -> None:
        self.news: list[WheelNews] = []

    @property
    def rows(self) -> list[tuple[int, str, int, str, int, int, str]]:
        """(iteration, request, lane, phase, tokens, context, end)"""
        return [
            (turn.number, news.requests[row.request].id, row.lane, row.phase, row.num_tokens, row.context, row.end)
            for news in self.news
            for turn in news.iterations
            for row in turn.rows
        ]

    def of(self, request_id: str) -> list[tuple[int, str, int, str, int, int, str]]:
        return [row for row in self.rows if row[1] == request_id]

    async def until(self, condition, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, "did not come true in time"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(store: str) -> AsyncIterator[Watcher]:
    subscription, watcher = WheelSubscription(store), Watcher()

    async def read() -> None:
        async for message in subscription.news():
            watcher.news.append(msgspec.json.decode(message, type=WheelNews))

    task = asyncio.create_task(read())
    try:
        yield watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await subscription.close()


async def test_a_watcher_sees_a_request_step_in_turn_and_leave(
    client: Client, turning: RunningEngine, wheel: Wheel, store: str
) -> None:
    async with watching(store) as watcher:
        await watcher.until(lambda: wheel.watched)
        assert watcher.news[0].iterations == [] and watcher.news[0].engine == "engine-one"
        await client.send("long", [100] * 150, sampling={"max_tokens": 30}, tenant="alice", service_class="priority")
        await client.send("short", [300], sampling={"max_tokens": 3}, tenant="bob")
        await client.ends("long", "short")
        await watcher.until(lambda: bool(watcher.of("long")) and watcher.of("long")[-1][-1] != "")
    assert [row[0] for row in watcher.of("long")] == list(range(1, 1 + len(watcher.of("long")))), "every iteration"
    phases = "".join(row[3] for row in watcher.of("long"))
    # The prompt is read in chunks of 64 tokens; its last one gives the first output token.
    assert phases.lstrip("p") == "d" * 29 and sum(row[4] for row in watcher.of("long") if row[3] == "p") == 150
    assert watcher.of("long")[-1][5:] == (179, "length")
    assert {row[2] for row in watcher.of("long")} == {0} and {row[2] for row in watcher.of("short")} == {1}
    assert [row[-1] for row in watcher.of("short")] == ["", "", "length"]
    (long,) = {request for news in watcher.news for request in news.requests if request.id == "long"}
    assert (long.tenant, long.service_class, long.prompt_tokens, long.max_tokens) == ("alice", "priority", 150, 30)


async def test_a_lane_is_taken_again_and_blocks_come_back(
    client: Client, turning: RunningEngine, wheel: Wheel, store: str
) -> None:
    async with watching(store) as watcher:
        await watcher.until(lambda: wheel.watched)
        for round_ in range(3):
            names = [f"{round_}-{place}" for place in range(4)]
            for place, name in enumerate(names):
                await client.send(name, [10 * place], sampling={"max_tokens": 2 + place})
            await client.ends(*names)
        await watcher.until(lambda: sum(row[-1] != "" for row in watcher.rows) == 12)
    assert max(row[2] for row in watcher.rows) <= 3
    turns = [turn for news in watcher.news for turn in news.iterations]
    assert all(len({row.lane for row in turn.rows}) == len(turn.rows) for turn in turns), "two in one slot"
    assert turns[-1].blocks_used == 0 and all(turn.forward_us >= 4000 for turn in turns)


async def test_it_stops_when_the_last_watcher_has_left(
    client: Client, turning: RunningEngine, wheel: Wheel, store: str
) -> None:
    async with watching(store) as watcher, watching(store) as other:
        await watcher.until(lambda: wheel.watched and bool(watcher.news) and bool(other.news))
    await watcher.until(lambda: not wheel.watched)
    heard = len(watcher.news)
    await client.send("unseen", [1], sampling={"max_tokens": 5})
    await client.ends("unseen")
    assert len(watcher.news) == heard and wheel._count == 0, "an iteration that nobody watched was recorded"


async def test_whoever_comes_late_sees_who_is_there(
    client: Client, turning: RunningEngine, wheel: Wheel, store: str
) -> None:
    await client.send("early", [1], sampling={"max_tokens": 400})
    await client.read(lambda: len(client.tokens.get("early", [])) > 3)
    async with watching(store) as watcher:
        await watcher.until(lambda: len(watcher.of("early")) > 10)
    assert {row[3] for row in watcher.of("early")} == {"d"}
    await client.broker.cancel("tiny", "early")
    await client.ends("early")


def test_without_a_store_nothing_is_held_up() -> None:
    wheel = Wheel(WheelChannel("unix:///nowhere/store.sock", "tiny"), BARE)
    time.sleep(0.1)
    assert not wheel.watched and wheel._thread.is_alive()
    wheel.close()
    assert not wheel._thread.is_alive()


def test_handing_over_an_iteration_of_64_rows_is_nearly_free() -> None:
    """Against the scheduler's own time for the same rows, which is a few hundredths of an iteration's."""
    kv = KVBlocks(64 * 40, 16, prefix_cache=False)
    scheduler = Scheduler(POLICIES["paged"], kv, max_batch_size=64, max_batch_tokens=512, max_model_len=640)
    lives = {}
    for index in range(64):
        request = GenerationRequest(f"r{index}", "tiny", [1, 2], SamplingParams(max_tokens=600), "gateway")
        live = LiveRequest.start(Claimed(request, 1, []), CARD, request.id)
        lives[request.id] = live
        scheduler.add(live.scheduled)
    wheel = Wheel(WheelChannel("unix:///nowhere/store.sock", "tiny"), BARE)
    scheduling, recording = [], []
    for _ in range(300):
        started = perf_counter()
        batch = scheduler.select()
        assert batch is not None
        scheduler.complete(batch, [(7,) for _ in batch.rows])
        selected = perf_counter()
        wheel.record(batch, [lives[row.request.id] for row in batch.rows], scheduler, Times(0.0, 0.0))
        recording.append(perf_counter() - selected)
        scheduling.append(selected - started)
    wheel.close()
    assert median(recording) < 0.25 * median(scheduling), f"{1e6 * median(recording):.1f} µs"
