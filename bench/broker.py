"""What the queue costs, packed against naive, at 64 streams in one run: `python bench/broker.py [--url URL] [--soak]`.

Packed is ours: one exchange of the engine per iteration, one stream per gateway. Naive is an awaited XADD per token to
a stream per request, and an XREAD per request. Engine, gateway and store are three processes, as in life; CPU is that
of all three. `--soak` sends 10,000 requests through and counts the keys that are left.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median, quantiles

import redis
import redis.asyncio
from rich.console import Console
from rich.table import Table

from bench.store import running_store
from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.messages import (
    Claimed,
    EngineStats,
    FinishReason,
    GenerationRequest,
    ModelCard,
    SamplingParams,
    TokenFrame,
    TokenizerFiles,
    Usage,
    decode_frame,
    encode,
)

MODEL = "bench"
STREAMS = 64
SECONDS = 8.0
MIN_SPEEDUP, MAX_CPU_SHARE, MAX_EXCHANGE = 15.0, 1 / 20, 1e-3
CARD = ModelCard(
    id=MODEL,
    aliases=(),
    created=0,
    max_model_len=10**9,
    vocab_size=50_000,
    kv_tokens=10**9,
    block_size=16,
    eos_token_ids=(),
    reserve_output=False,
    policy="paged",
    fingerprint="",
)
FILES = TokenizerFiles(tokenizer_json="{}", chat_template=None, bos_token=None, eos_token=None, add_bos=False)


@dataclass
class Cost:
    """What one design did in its time."""

    tokens: int = 0
    seconds: float = 0.0
    cpu: float = 0.0  # seconds, of engine, gateway and store together
    turns: list[float] = field(default_factory=list)  # seconds per iteration of the engine
    turns_cpu: list[float] = field(default_factory=list)

    @contextmanager
    def measured(self, url: str) -> Iterator[None]:
        """Adds the CPU seconds of this process and of the store."""
        with redis.Redis.from_url(url, protocol=2) as client:
            cpu = time.process_time() + _cpu_of(client)
            yield
            self.cpu += time.process_time() + _cpu_of(client) - cpu

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_per_token(self) -> float:
        return self.cpu / self.tokens


def _cpu_of(client: redis.Redis) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def request(index: int, gateway: str, max_tokens: int = 10**8) -> GenerationRequest:
    return GenerationRequest(
        id=f"request-{index:012}",
        model=MODEL,
        prompt=list(range(100)),
        sampling=SamplingParams(max_tokens=max_tokens),
        gateway=gateway,
        tenant=f"tenant{index % 5}",
    )


def token(claimed: Claimed, seq: int, finish: FinishReason | None = None) -> TokenFrame:
    usage = Usage(len(claimed.request.prompt), seq + 1) if finish else None
    return TokenFrame(claimed.request.id, claimed.epoch, seq, [seq], finish=finish, usage=usage)


def packed_engine(url: str, seconds: float, results: Connection) -> None:
    """Gives every row a token per iteration, with nothing in between, until the time is over."""
    broker, turns, cpu = EngineBroker(url, MODEL), list[float](), list[float]()
    broker.register(CARD, FILES)
    claimed: list[Claimed] = []
    while len(claimed) < STREAMS:
        claimed += broker.exchange({}, None, max_requests=STREAMS, max_blocks=10**6).claimed
    gateway = claimed[0].request.gateway
    cpu_before, started, seq = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        frames = {gateway: [token(c, seq) for c in claimed]}
        before, turn_before = time.perf_counter(), time.process_time()
        broker.exchange(frames, EngineStats(), max_requests=1, max_blocks=1000)
        turns.append(time.perf_counter() - before)
        cpu.append(time.process_time() - turn_before)
        seq += 1
    frames = {gateway: [token(c, seq, FinishReason.LENGTH) for c in claimed]}
    broker.exchange(frames, None, max_requests=0, max_blocks=0)
    results.send((turns, cpu, time.perf_counter() - started, time.process_time() - cpu_before))
    broker.close()


async def packed_reader(url: str, cost: Cost) -> None:
    gateway = GatewayBroker(url)
    await gateway.start()
    for i in range(STREAMS):
        await gateway.enqueue(request(i, gateway.boot_id), CARD)
    live = STREAMS
    with cost.measured(url):
        async for frames in gateway.frames():
            cost.tokens += len(frames)
            live -= sum(frame.finish is not None for frame in frames)
            if not live:
                break
    await gateway.close()


def naive_engine(url: str, seconds: float, results: Connection) -> None:
    """As one would write it first: each request has a stream, each token is an awaited XADD."""
    turns: list[float] = []

    async def run() -> None:
        store, seq, last = redis.asyncio.Redis.from_url(url, protocol=2), 0, False
        started = time.perf_counter()
        while not last:
            last = time.perf_counter() - started > seconds
            finish = FinishReason.LENGTH if last else None
            before = time.perf_counter()
            for i in range(STREAMS):
                frame = TokenFrame(f"request-{i:012}", 1, seq, [seq], finish=finish)
                await store.xadd(f"naive:{i}", {"f": encode(frame)})
            turns.append(time.perf_counter() - before)
            seq += 1
        await store.aclose()

    cpu_before, started = time.process_time(), time.perf_counter()
    asyncio.run(run())
    seconds = time.perf_counter() - started
    results.send((turns, [], seconds, time.process_time() - cpu_before))


async def naive_reader(url: str, cost: Cost) -> None:
    """Each request waits for its tokens with an XREAD of its own."""
    store = redis.asyncio.Redis.from_url(url, protocol=2, max_connections=2 * STREAMS)

    async def stream(index: int) -> None:
        last_read = b"0-0"
        while True:
            for _, entries in await store.xread({f"naive:{index}": last_read}, block=1000):
                for entry, fields in entries:
                    last_read = entry
                    cost.tokens += 1
                    if decode_frame(fields[b"f"]).finish:
                        return

    with cost.measured(url):
        await asyncio.gather(*(stream(i) for i in range(STREAMS)))
    await store.aclose()


def compare(
    url: str, engine: Callable[..., None], reader: Callable[..., Coroutine[None, None, None]], seconds: float
) -> Cost:
    """Run one design: its engine in a process of its own, its readers here."""
    cost, (results, child_end) = Cost(), multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(url, seconds, child_end))
    process.start()
    asyncio.run(reader(url, cost))
    cost.turns, cost.turns_cpu, cost.seconds, cpu = results.recv()
    cost.cpu += cpu
    process.join()
    return cost


async def soak(url: str, count: int) -> tuple[int, int]:
    """Send `count` requests of four tokens through one engine; (keys at rest before, keys at rest after)."""
    client = redis.Redis.from_url(url, protocol=2)
    gateway, engine = GatewayBroker(url), EngineBroker(url, MODEL)
    await gateway.start()
    engine.register(CARD, FILES)
    engine.exchange({}, EngineStats(), max_requests=0, max_blocks=0)
    before = client.dbsize()
    stop = threading.Event()
    serving = threading.Thread(target=_serve, args=(engine, stop))
    serving.start()
    sending = asyncio.create_task(_send(gateway, count))
    live = count
    async for frames in gateway.frames():
        live -= sum(frame.finish is not None for frame in frames)
        if not live:
            break
    await sending
    stop.set()
    await asyncio.to_thread(serving.join)
    after = client.dbsize()
    engine.close()
    await gateway.close()
    client.close()
    return before, after


async def _send(gateway: GatewayBroker, count: int) -> None:
    for start in range(0, count, 64):
        batch = range(start, min(start + 64, count))
        await asyncio.gather(*(gateway.enqueue(request(i, gateway.boot_id, 4), CARD) for i in batch))
        if start % 7 == 0:
            await gateway.cancel(MODEL, request(start, gateway.boot_id).id)


def _serve(engine: EngineBroker, stop: threading.Event) -> None:
    running: dict[str, tuple[Claimed, int]] = {}
    frames: dict[str, list[TokenFrame]] = {}
    while not stop.is_set() or running or frames:
        room = STREAMS - len(running)
        outcome = engine.exchange(frames, EngineStats(), max_requests=room, max_blocks=10**6)
        frames = {}
        running |= {c.request.id: (c, 0) for c in outcome.claimed}
        ends = set(outcome.cancelled)
        for request_id, (claimed, seq) in list(running.items()):
            finish = FinishReason.CANCELLED if request_id in ends else FinishReason.LENGTH if seq == 3 else None
            frames.setdefault(claimed.request.gateway, []).append(token(claimed, seq, finish))
            running[request_id] = claimed, seq + 1
            if finish:
                del running[request_id]
        if not running and not frames:
            engine.wait(0.05)


def report(ours: Cost, theirs: Cost) -> bool:
    table = Table(title=f"{STREAMS} streams")
    for heading in ("design", "tokens/s", "CPU us/token", "iteration p50 ms", "p95 ms", "engine CPU ms"):
        table.add_column(heading, justify="left" if heading == "design" else "right")
    for name, cost in (("packed (ours)", ours), ("naive", theirs)):
        p95 = quantiles(cost.turns, n=20)[-1]
        engine_cpu = f"{1e3 * median(cost.turns_cpu):.2f}" if cost.turns_cpu else ""
        figures = (f"{cost.rate:,.0f}", f"{1e6 * cost.cpu_per_token:.1f}", f"{1e3 * median(cost.turns):.2f}")
        table.add_row(name, *figures, f"{1e3 * p95:.2f}", engine_cpu)
    console = Console()
    console.print(table)
    speedup, share = ours.rate / theirs.rate, ours.cpu_per_token / theirs.cpu_per_token
    bars = (
        (f"{speedup:.1f}x the tokens/s", speedup >= MIN_SPEEDUP, f"at least {MIN_SPEEDUP:g}x"),
        (f"1/{1 / share:.1f} of the CPU per token", share < MAX_CPU_SHARE, "under 1/20"),
        (f"{1e3 * median(ours.turns):.2f} ms per exchange", median(ours.turns) < MAX_EXCHANGE, "under 1 ms"),
    )
    for what, met, bar in bars:
        console.print(f"{what}: {'ok' if met else 'MISSED'} (bar: {bar})")
    return all(met for _, met, _ in bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a store to use instead of a private Redis; its key `naive:*` are overwritten")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="per design")
    parser.add_argument(
        "--soak", nargs="?", type=int, const=10_000, metavar="N", help="send N requests, count the keys"
    )
    args = parser.parse_args()
    with running_store() as private:
        url = args.url or private.url
        if args.soak:
            started = time.perf_counter()
            before, after = asyncio.run(soak(url, args.soak))
            seconds = time.perf_counter() - started
            print(f"{args.soak} requests in {seconds:.1f} s: {before} keys at rest before, {after} after")
            return int(before != after)
        theirs = compare(url, naive_engine, naive_reader, args.seconds)
        ours = compare(url, packed_engine, packed_reader, args.seconds)
        return int(not report(ours, theirs))


if __name__ == "__main__":
    raise SystemExit(main())
