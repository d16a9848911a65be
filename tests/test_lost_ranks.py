"""Real engines on several ranks that lose one: what they held goes on at another engine, and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bench.chaos import Client, judge, make_specs, run_all
from bench.cluster import Cluster, wait_until
from bench.tiny_model import make

MODEL = "ranks"
LEASE = 3.0
OPTIONS = (
    *("--kv-memory=16MiB", "--max-model-len=2048", f"--served-model-name={MODEL}", "--log-format=json"),
    f"--lease-seconds={LEASE}",
)
SPECS = make_specs(6, seed=3, longest=600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """One engine of two stages, and one of a single process."""
    running = Cluster(model, num_engines=0, num_gateways=1, start_seconds=240)
    running.engines += [running.engine("staged", model, (*OPTIONS, "--pp=2")), running.engine("plain", model, OPTIONS)]
    with running:
        yield running


def children(pid: int) -> list[int]:
    """Its ranks; other children, which try out grammars, are none."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"noria.engine.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.timeout(480)  # on a machine with other work: six processes start
async def test_requests_of_an_engine_that_lost_a_rank_go_on_elsewhere(cluster: Cluster) -> None:
    staged, plain = cluster.engines
    client = Client(cluster, MODEL, time.monotonic() + 200)

    undisturbed = await run_all(client, SPECS)
    assert not [answer.problem or answer.error for answer in undisturbed if answer.problem or answer.error]
    plain.send(signal.SIGSTOP)  # all is claimed by the engine with two stages
    await asyncio.sleep(0.1)
    running = asyncio.create_task(run_all(client, SPECS))
    try:
        await asyncio.sleep(1.0)
        (rank,) = children(staged.pid)
        os.kill(rank, signal.SIGKILL)
        killed = time.monotonic()
        assert await asyncio.to_thread(staged.wait, 10) == 1
        assert time.monotonic() - killed < LEASE + 1
        assert not is_alive(rank)
    finally:
        plain.send(signal.SIGCONT)
    answers = await running
    verdicts = (judge(answer, expected) for answer, expected in zip(answers, undisturbed, strict=True))
    assert [verdict for verdict in verdicts if verdict] == []
    assert not any(answer.error for answer in answers)
    last = staged.log().strip().splitlines()[-1]
    assert last == f"noria engine: rank 1 (process {rank}) ended (SIGKILL)"
    await client.close()


@pytest.mark.slow
def test_ranks_started_by_others_end_with_the_first(cluster: Cluster, model: Path) -> None:
    """By torchrun's variables, as on several machines."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    first, second = (
        cluster.engine(f"rank{rank}", model, (*OPTIONS, "--tp=2"), {**shared, "RANK": str(rank)}) for rank in range(2)
    )
    try:
        second.start()
        first.start()
        wait_until(first.is_ready, 150, lambda: first.log() + second.log())
        assert children(first.pid) == [] and second.alive
        first.send(signal.SIGKILL)
        assert second.wait(10) == 0
        assert "error" not in second.log()
    finally:
        first.kill()
        second.kill()
