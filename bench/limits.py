"""What limits cost, and that they hold: ADMIT against a GET, latency added at a steady rate, and races over gateways.

    python -m bench.limits [--part admit|latency|races|revocation]

Needs redis-server. A scripted engine answers, so that what is measured is the way in and the way out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import httpx
import orjson
import redis
import structlog

from bench.cluster import Gateway, status, wait_until
from bench.gateway import byte_tokenizer
from bench.store import Store, running_store
from noria.engine.wire.broker import EngineBroker
from noria.engine.wire.connection import AsyncStore
from noria.engine.wire.messages import EngineStats, FinishReason, ModelCard, TokenFrame, Usage
from noria.gateway.tenancy import books, names
from noria.gateway.tenancy.administration import Administration
from noria.gateway.tenancy.bootstrap import DEFAULT_PROJECT, bootstrap, opened
from noria.gateway.tenancy.directory import Actor
from noria.gateway.tenancy.limits import bounds
from noria.gateway.tenancy.names import DEFAULT_ORGANIZATION
from noria.gateway.tenancy.principal import Principal
from noria.gateway.tenancy.records import Limits

MODEL = "bench"
Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
STATIC = "sk-static"
PEPPER = "pepper-of-the-bench-0123456789abcdef"
ACTOR = Actor("cli", "bench")
BIG = 10**12
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
EIGHT = Limits(
    requests_per_minute=BIG, requests_per_day=BIG, tokens_per_minute=BIG, tokens_per_day=BIG,
    input_tokens_per_minute=BIG, output_tokens_per_minute=BIG, output_tokens_per_day=BIG, concurrent_requests=BIG,
)  # fmt: skip


async def make_key(url: str, limits: Limits) -> tuple[Principal, str]:
    async with opened(url, PEPPER) as administration:
        return await _make_key(administration, limits)


async def _make_key(administration: Administration, limits: Limits) -> tuple[Principal, str]:
    given = {"name": "bench", "limits": limits}
    key, secret = await administration.create_key(ACTOR, DEFAULT_ORGANIZATION, DEFAULT_PROJECT, given)
    snapshot = await administration.directory.snapshot(DEFAULT_ORGANIZATION)
    organization, (project, *_) = snapshot.organization, snapshot.projects
    assert organization is not None
    return Principal(organization, project, key, snapshot.version), secret.value


async def admit(url: str, rounds: int = 3000) -> None:
    """ADMIT with eight limits against GET, one after the other over one connection, by turns."""
    principal, _ = await make_key(url, EIGHT)
    found = bounds(principal, MODEL, time.time())
    store, prefix = AsyncStore(url), names.organization(DEFAULT_ORGANIZATION)
    await store.run(("SET", "bench:key", "x" * 32))
    times: dict[str, list[float]] = {"GET": [], "ADMIT": [], "WITHDRAW": []}

    async def timed(name: str, work: Callable[[], Awaitable[object]]) -> None:
        began = time.perf_counter()
        await work()
        times[name].append((time.perf_counter() - began) * 1e6)

    for n in range(rounds):
        meters, gates = ([bound.packed() for bound in bounds] for bounds in (found.meters, found.gates))
        parts = [(f"r{n}-0", 100, 200)]
        spec = (f"r{n}", principal.version, 10_000, MODEL, parts, meters, gates, [], (0, 0))
        await timed("GET", lambda: store.run(("GET", "bench:key")))
        packed = books.pack(spec)
        await timed("ADMIT", lambda: store.run(books.ADMIT(prefix, packed)))  # noqa: B023
        await timed("WITHDRAW", lambda: store.run(books.WITHDRAW(prefix, f"r{n}", f"r{n}-0")))  # noqa: B023
    await store.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    print("round trip p50, us: " + ", ".join(f"{name} {value:.0f}" for name, value in medians.items()))
    print(f"ADMIT with {len(found.meters) + len(found.gates)} limits: {medians['ADMIT'] / medians['GET']:.2f} x GET")


@dataclass
class Load:
    """Requests at a steady rate, each sent when it is due whatever became of those before. Over bare sockets: a client
    library would take more of the machine than the gateway does."""

    url: str
    rate: float = 200.0
    seconds: float = 8.0
    connections: int = 64

    async def run(self, keys: dict[str, str]) -> dict[str, list[float]]:
        """Milliseconds by name of the key; the keys take turns, so that all meet the same machine."""
        taken: dict[str, list[float]] = {name: [] for name in keys}
        host, _, port = self.url.removeprefix("http://").partition(":")
        free: asyncio.Queue[Connection] = asyncio.Queue()
        for _ in range(self.connections):
            free.put_nowait(await asyncio.open_connection(host, int(port)))
        asked = {name: _request(host, key) for name, key in keys.items()}
        began, tasks, names_ = time.perf_counter(), [], list(keys)
        for n in range(int(self.rate * self.seconds)):
            await asyncio.sleep(max(0.0, began + n / self.rate - time.perf_counter()))
            name = names_[n % len(names_)]
            tasks.append(asyncio.ensure_future(self._one(free, asked[name], taken[name])))
        await asyncio.gather(*tasks)
        while not free.empty():
            free.get_nowait()[1].close()
        return taken

    async def _one(self, free: asyncio.Queue[Connection], request: bytes, taken: list[float]) -> None:
        began = time.perf_counter()
        reader, writer = await free.get()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        assert head.startswith(b"HTTP/1.1 200"), head
        taken.append((time.perf_counter() - began) * 1000)
        free.put_nowait((reader, writer))


def _request(host: str, key: str) -> bytes:
    body = orjson.dumps(BODY)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def latency(url: str, gateway: Gateway, rate: float) -> None:
    """Added by authentication and eight limits, and by a stored key alone, to a key of the settings."""
    _, limited = await make_key(url, EIGHT)
    _, stored = await make_key(url, Limits())
    keys = {"settings": STATIC, "stored": stored, "limited": limited}
    await Load(gateway.url, rate, 2.0).run(keys)
    taken = await Load(gateway.url, rate).run(keys)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    nineties = {name: statistics.quantiles(values, n=10)[-1] for name, values in taken.items()}
    for name in keys:
        added = medians[name] - medians["settings"]
        print(f"{name:9} p50 {medians[name]:.2f} ms, p90 {nineties[name]:.2f} ms; added at p50: {added:.2f} ms")


async def races(url: str, gateways: list[Gateway]) -> None:
    """200 at once against 50 a minute, over all gateways; then concurrency and tokens, looked at all the while."""
    _, key = await make_key(url, Limits(requests_per_minute=50))
    began = time.monotonic()
    codes = await _at_once(gateways, key, 200)
    took = time.monotonic() - began
    refilled = int(took * 50 / 60)
    print(f"50 a minute, 200 at once over {len(gateways)} gateways: {codes.count(200)} in {took:.2f} s "
          f"(50 and at most {refilled} refilled meanwhile), {codes.count(429)} refused")  # fmt: skip
    assert 50 <= codes.count(200) <= 50 + refilled, codes

    _, key = await make_key(url, Limits(concurrent_requests=7, tokens_per_day=20_000))
    watching = asyncio.ensure_future(asyncio.to_thread(_watch, url))
    for _ in range(4):
        await _at_once(gateways, key, 100, max_tokens=50)
    most = await watching
    print(f"7 at a time, 20,000 tokens: {most[0]} at a time and {most[1]:.0f} tokens used and reserved at most")
    assert most[0] <= 7 and most[1] <= 20_000
    client = redis.Redis.from_url(url, decode_responses=True)
    wait_until(lambda: not list(client.scan_iter("noria:{*}:reservation:*")), 30, lambda: "reservations are left")
    held = [v.split()[2] for k in client.scan_iter("noria:{*}:meters:*") for v in client.hgetall(k).values()]
    print(f"reserved at rest: {sum(map(float, held)):.0f} over {len(held)} meters")
    assert not any(map(float, held))


def _watch(url: str, seconds: float = 4.0) -> tuple[int, float]:
    """The most that ran at a time and was used and reserved, over all keys with a limit on what runs at a time."""
    client, until, most = redis.Redis.from_url(url, decode_responses=True), time.monotonic() + seconds, (0, 0.0)
    while time.monotonic() < until:
        for gate in client.scan_iter("noria:{*}:running:*"):
            subject = gate.rpartition(":")[2]
            running = int(client.scard(gate))
            meter = client.hget(f"noria:{{{DEFAULT_ORGANIZATION}}}:meters:{subject}", "td") or "0 0 0"
            used, _, held = map(float, meter.split())
            most = (max(most[0], running), max(most[1], used + held))
    return most


async def _at_once(gateways: list[Gateway], key: str, number: int, **fields: object) -> list[int]:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=30) as client:

        async def one(n: int) -> int:
            url = f"{gateways[n % len(gateways)].url}/v1/chat/completions"
            return (await client.post(url, json={**BODY, **fields})).status_code

        return list(await asyncio.gather(*map(one, range(number))))


async def revocation(url: str, gateways: list[Gateway], rounds: int = 10) -> None:
    """From the acknowledged revocation to the first refusal, at every gateway."""
    worst = 0.0
    for _ in range(rounds):
        async with opened(url, PEPPER) as administration:
            principal, key = await _make_key(administration, Limits())
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
                for gateway in gateways:
                    (await client.get(f"{gateway.url}/v1/models")).raise_for_status()
                await administration.delete_key(ACTOR, DEFAULT_ORGANIZATION, DEFAULT_PROJECT, principal.key.id)
                began = time.monotonic()
                for gateway in gateways:
                    while (await client.get(f"{gateway.url}/v1/models")).status_code == 200:
                        await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - began)
    print(f"revoked: refused everywhere after {worst * 1000:.0f} ms at most, of {rounds} times")


class Echo(threading.Thread):
    """An engine that computes nothing: every request has all its tokens in the iteration after its claim."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.halt = False
        self._broker = EngineBroker(url, MODEL)
        card = ModelCard(
            id=MODEL, aliases=(), created=1, max_model_len=8192, vocab_size=257, kv_tokens=1 << 20, block_size=16,
            eos_token_ids=(256,), reserve_output=False, policy="paged", fingerprint="fp_bench",
        )  # fmt: skip
        self._broker.register(card, byte_tokenizer())

    def run(self) -> None:
        frames: dict[str, list[TokenFrame]] = {}
        while not self.halt:
            outcome = self._broker.exchange(frames, EngineStats(), max_requests=256, max_blocks=1 << 20)
            frames = {}
            for claimed in outcome.claimed:
                request, number = claimed.request, claimed.request.sampling.max_tokens
                usage = Usage(len(request.prompt), number)
                frame = TokenFrame(request.id, claimed.epoch, 0, [97] * number, finish=FinishReason.LENGTH, usage=usage)
                frames.setdefault(request.gateway, []).append(frame)
            if not frames:
                self._broker.wait(0.05)
        self._broker.close()


def start_gateway(store: Store, name: str) -> Gateway:
    """A process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {**os.environ, "NORIA_REDIS_URL": store.url, "NORIA_KEY_PEPPER": PEPPER, "NORIA_API_KEY": STATIC}
    argv = [sys.executable, "-m", "noria", "gateway", f"--port={port}", "--log-level=warning"]
    url = f"http://127.0.0.1:{port}"
    gateway = Gateway(name, argv, env, Path(store.folder), lambda: status(f"{url}/readyz") == 200)
    gateway.url = url
    gateway.start()
    wait_until(gateway.is_ready, 60, gateway.log)
    return gateway


def run(store: Store, part: str, rate: float) -> None:
    url = store.url
    asyncio.run(bootstrap(url, PEPPER))
    if part in ("", "admit"):
        asyncio.run(admit(url))
    if part == "admit":
        return
    engine = Echo(url)
    engine.start()
    gateways: list[Gateway] = []
    try:
        gateways += [start_gateway(store, f"gateway{n}") for n in range(2)]
        if part in ("", "latency"):
            asyncio.run(latency(url, gateways[0], rate))
        if part in ("", "races"):
            asyncio.run(races(url, gateways))
        if part in ("", "revocation"):
            asyncio.run(revocation(url, gateways))
    finally:
        for gateway in gateways:
            gateway.kill()
        engine.halt = True
        engine.join(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", choices=("", "admit", "latency", "races", "revocation"))
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second of the latency part")
    parser.add_argument("--store", default="redis", choices=("redis", "valkey"))
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with running_store(given.store) as store:
        run(store, given.part, given.rate)


if __name__ == "__main__":
    main()
