"""Real processes of a tiny model, stopped, killed and told to go while they stream: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from bench.chaos import Answer, Client, judge, make_specs, run_all
from bench.cluster import KEY, Cluster, wait_until
from bench.tiny_model import make
from noria.engine.wire.queue_view import PoolView, open_view

MODEL = "fire"
SPECS = make_specs(12, seed=3, longest=1200)  # for seconds, so that a fast machine is at work when it is disturbed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make(tmp_path_factory.mktemp("model") / "tiny")
    engine = (
        "--kv-memory=32MiB",
        "--max-model-len=2048",
        f"--served-model-name={MODEL}",
        "--drain-timeout=20",
        "--max-batch-size=8",  # fewer than SPECS: neither engine can take them all before the other one wakes
    )
    with Cluster(model, lease_seconds=1.5, engine_options=engine, gateway_options=("--resend-after=3",)) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    async def run() -> list[Answer]:
        client = Client(cluster, MODEL, time.monotonic() + 120)
        try:
            return await run_all(client, SPECS)
        finally:
            await client.close()

    answers = asyncio.run(run())
    assert [answer.problem or answer.error for answer in answers] == [""] * len(SPECS)
    assert [len(answer.text) for answer in answers] == [spec.max_tokens for spec in SPECS]
    return answers


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    await asyncio.to_thread(cluster.await_ready)
    found = Client(cluster, MODEL, time.monotonic() + 120)
    yield found
    await found.close()


def pool(cluster: Cluster) -> PoolView:
    with open_view(cluster.store_url) as view:
        (found,) = view.pools()
        return found


async def streaming(cluster: Cluster) -> None:
    """Until both engines are at work."""
    await asyncio.to_thread(
        wait_until,
        lambda: all(engine.held for engine in pool(cluster).engines) and len(pool(cluster).engines) == 2,
        30,
        lambda: str(pool(cluster)),
    )


def wrong(answers: list[Answer], undisturbed: list[Answer]) -> list[str]:
    verdicts = (judge(answer, expected) for answer, expected in zip(answers, undisturbed, strict=True))
    return [verdict for verdict in verdicts if verdict]


async def at_rest(cluster: Cluster) -> None:
    """Until nothing waits and nothing is held: what ended has ended everywhere."""

    def rests() -> bool:
        found = pool(cluster)
        return not sum(found.depth.values()) and not any(engine.held for engine in found.engines)

    await asyncio.to_thread(wait_until, rests, 20, lambda: str(pool(cluster)))


async def test_a_sleeping_engine_finds_itself_fenced(
    cluster: Cluster, client: Client, undisturbed: list[Answer]
) -> None:
    sleeper, other = cluster.engines
    running = asyncio.create_task(run_all(client, SPECS))
    await streaming(cluster)
    sleeper.send(signal.SIGSTOP)
    answers = await running  # the other one has taken over
    sleeper.send(signal.SIGCONT)
    assert wrong(answers, undisturbed) == [] and not any(answer.error for answer in answers)
    await asyncio.to_thread(
        wait_until, lambda: "the lease was lost" in sleeper.log(), 20, lambda: sleeper.log()[-2000:]
    )
    other.send(signal.SIGSTOP)  # now the sleeper serves alone
    try:
        assert wrong(await run_all(client, SPECS[:3]), undisturbed[:3]) == []
    finally:
        other.send(signal.SIGCONT)
    await at_rest(cluster)


async def refused(cluster: Cluster) -> float:
    """Send a request and see it refused with Retry-After; returns the seconds that it took."""
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=cluster.gateways[0].url, timeout=20) as http:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
        answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
        ready, healthy = await http.get("/readyz"), await http.get("/healthz")
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "server_is_overloaded"
    assert (ready.status_code, healthy.status_code) == (503, 200)
    return time.monotonic() - began


async def test_a_store_that_stands_still(cluster: Cluster, client: Client, undisturbed: list[Answer]) -> None:
    running = asyncio.create_task(run_all(client, SPECS))
    await streaming(cluster)
    cluster.store.send(signal.SIGSTOP)
    await asyncio.sleep(4)
    cluster.store.send(signal.SIGCONT)
    answers = await running
    assert wrong(answers, undisturbed) == []
    await asyncio.to_thread(cluster.await_ready, 20)
    await at_rest(cluster)


@pytest.mark.parametrize("loses_a_second", [False, True])
async def test_a_store_that_dies_and_comes_back(
    cluster: Cluster, client: Client, undisturbed: list[Answer], loses_a_second: bool
) -> None:
    running = asyncio.create_task(run_all(client, SPECS))
    await streaming(cluster)
    (file,) = (cluster.folder / "data" / "appendonlydir").glob("*.incr.aof")
    size = file.stat().st_size
    await asyncio.sleep(1.0 if loses_a_second else 0.0)
    cluster.store.kill()
    try:
        if loses_a_second:
            with file.open("r+b") as log:
                log.truncate(size)
        assert await refused(cluster) < 8
        await asyncio.sleep(1)
    finally:
        cluster.store.start()
    answers = await running
    assert wrong(answers, undisturbed) == []
    await asyncio.to_thread(cluster.await_ready, 20)
    assert wrong(await run_all(client, SPECS[:3]), undisturbed[:3]) == []
    await at_rest(cluster)


@pytest.mark.slow
async def test_a_rolling_restart_loses_nothing(cluster: Cluster, client: Client, undisturbed: list[Answer]) -> None:
    everybody = asyncio.Event()

    async def load() -> list[tuple[Answer, Answer]]:
        pairs = []
        while not everybody.is_set():
            pairs += list(zip(await run_all(client, SPECS), undisturbed, strict=True))
        return pairs

    loading = asyncio.create_task(load())
    for part in (*cluster.engines, *cluster.gateways):
        await asyncio.sleep(0.5)
        part.send(signal.SIGTERM)
        try:
            assert await asyncio.to_thread(part.wait, 40) == 0, part.log()[-2000:]
        except subprocess.TimeoutExpired:
            pytest.fail(f"{part.name} did not end: {part.log()[-2000:]}")
        part.start()
        await asyncio.to_thread(cluster.await_ready, 60)
    everybody.set()
    pairs = await loading
    assert [verdict for verdict in (judge(*pair) for pair in pairs) if verdict] == []
    assert not any(answer.error or answer.cut for answer, _ in pairs)
    await at_rest(cluster)
