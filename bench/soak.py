"""A server under steady load for long: memory, descriptors and keys of the store must not grow.

    python -m bench.soak                        # 30 minutes at 70 % of what it can take
    python -m bench.soak --seconds 40           # a short look

First it is measured what the server can take; then requests arrive at random (a Poisson process) at `--load` of it.
One in five clients hangs up in mid-stream. Every two seconds each process' resident memory and descriptors are read;
medians of the first and the last quarter of the run, its warm-up left out, may differ by 5 % (and 4 MiB, which are a
few arenas of the allocator). After the load the store must have no more keys than before it. Starts a store, an engine
of a tiny model and two gateways of its own. Exits with 1 where something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import psutil
import redis

from bench.cluster import KEY, Cluster
from bench.tiny_model import make

EVERY = 2.0  # seconds between samples
SHARE_LEAVING = 0.2
GROWTH, SLACK = 0.05, 4 * 2**20  # of resident memory; bytes
SLACK_FILES = 8  # connections that are being closed when a sample is taken


@dataclass
class Samples:
    """Of one process, in order."""

    memory: list[int] = field(default_factory=list)  # bytes
    files: list[int] = field(default_factory=list)


class Load:
    """Clients of some gateways."""

    def __init__(self, urls: list[str], model: str, seed: int) -> None:
        self._urls, self._model = urls, model
        self._chance = random.Random(seed)
        self.counts: Counter[str] = Counter()

    async def one(self, client: httpx.AsyncClient) -> None:
        """One request, to its end or until its client has enough of it."""
        leaves = self._chance.random() < SHARE_LEAVING
        prompt = "".join(self._chance.choices("abcdefgh ", k=self._chance.randint(10, 200)))
        body = {"model": self._model, "prompt": prompt, "max_tokens": self._chance.randint(4, 40), "stream": True}
        url = f"{self._chance.choice(self._urls)}/v1/completions"
        try:
            async with client.stream("POST", url, json=body | {"ignore_eos": True}) as answer:
                if answer.status_code != 200:
                    self.counts[str(answer.status_code)] += 1
                    return
                last = ""
                async for line in answer.aiter_lines():
                    if leaves and line.startswith("data: "):
                        self.counts["left"] += 1
                        return
                    last = line or last
                self.counts["ended" if last == "data: [DONE]" else "broken"] += 1
        except httpx.TransportError as error:
            self.counts[type(error).__name__] += 1

    async def capacity(self, client: httpx.AsyncClient, seconds: float, clients: int = 16) -> float:
        """Requests per second with as many clients as keep the batch full."""
        until, done = time.monotonic() + seconds, 0

        async def repeat() -> None:
            nonlocal done
            while time.monotonic() < until:
                await self.one(client)
                done += 1

        await asyncio.gather(*(repeat() for _ in range(clients)))
        return done / seconds

    async def arrive(self, client: httpx.AsyncClient, rate: float, seconds: float) -> None:
        """At random, `rate` a second; returns once the last one has ended."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as running:
            while time.monotonic() < until:
                running.create_task(self.one(client))
                await asyncio.sleep(self._chance.expovariate(rate))


async def sampled(parts: dict[str, psutil.Process], work: Callable[[], Awaitable[None]]) -> dict[str, Samples]:
    """What the processes had while `work` went on."""
    samples = {name: Samples() for name in parts}
    task = asyncio.ensure_future(work())
    while not task.done():
        await asyncio.wait((task,), timeout=EVERY)
        for name, process in parts.items():
            samples[name].memory.append(process.memory_info().rss)
            samples[name].files.append(process.num_fds())
    await task
    return samples


def grown(values: list[int], slack: float, share: float = 0.0) -> tuple[float, float, bool]:
    """Medians of the first and the last quarter behind the warm-up, and whether the last is too large."""
    warm = values[len(values) // 5 :] or values
    quarter = max(1, len(warm) // 4)
    first, last = median(warm[:quarter]), median(warm[-quarter:])
    return first, last, last > first + max(share * first, slack)


def report(samples: dict[str, Samples]) -> list[str]:
    """Print what each process had; returns what grew."""
    faults = []
    for name, found in samples.items():
        first, last, more = grown(found.memory, SLACK, GROWTH)
        print(
            f"{name:10} resident {first / 2**20:7.1f} MiB, then {last / 2**20:7.1f} ({last / first - 1:+.1%})", end=""
        )
        files, later, more_files = grown(found.files, SLACK_FILES)
        print(f"; descriptors {files:.0f}, then {later:.0f}")
        faults += [f"{name}: memory"] * more + [f"{name}: descriptors"] * more_files
    return faults


async def fewest_keys(store: redis.Redis, enough: int, seconds: float = 30.0) -> int:
    """Keys once nothing runs: the fewest that are seen, but no fewer than `enough` are waited for."""
    until, fewest = time.monotonic() + seconds, int(store.dbsize())
    while fewest > enough and time.monotonic() < until:
        await asyncio.sleep(0.5)
        fewest = min(fewest, int(store.dbsize()))
    return fewest


async def drive(
    cluster: Cluster, options: argparse.Namespace, model: str, store: redis.Redis
) -> tuple[dict[str, Samples], int]:
    """The processes' samples, and the keys at rest before the load."""
    load = Load([gateway.url for gateway in cluster.gateways], model, options.seed)
    limits = httpx.Limits(max_connections=512)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=60, limits=limits) as client:
        await load.capacity(client, 2.0)  # first answers take longer
        capacity = await load.capacity(client, max(3.0, min(20.0, options.seconds / 8)))
        rate = options.load * capacity
        print(f"{capacity:.1f} requests/s are the most; {rate:.1f} arrive for {options.seconds:g} s", flush=True)
        load.counts.clear()
        before = await fewest_keys(store, 0, seconds=5.0)
        parts = {part.name: psutil.Process(part.pid) for part in cluster.parts}
        samples = await sampled(parts, lambda: load.arrive(client, rate, options.seconds))
    print(", ".join(f"{count} {what}" for what, count in sorted(load.counts.items())))
    bad = {what: count for what, count in load.counts.items() if what not in ("ended", "left")}
    if bad:
        raise SystemExit(f"requests failed: {bad}")
    return samples, before


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--load", type=float, default=0.7, help="share of what the server can take")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="noria-soak-") as folder:
        model = make(Path(folder) / "tiny")
        with Cluster(model, num_engines=1, num_gateways=2, engine_options=("--kv-memory=64MiB",)) as cluster:
            store = redis.Redis.from_url(cluster.store_url)
            samples, before = asyncio.run(drive(cluster, options, model.name, store))
            faults = report(samples)
            after = asyncio.run(fewest_keys(store, before))
            print(f"keys in the store at rest: {before} before, {after} after")
            faults += ["keys in the store"] * (after > before)
    print("grew: " + ", ".join(faults) if faults else "nothing grew")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
