"""Does the queue keep its promises under load? A real broker and loop; the model sleeps one step per iteration.

    python -m bench.fairness

1. Tenant A floods 500 requests while tenant B sends one strictly after another: B's median time to first token against
   B alone.
2. Two backlogged tenants with weights 1:3: their shares of the tokens.
3. A priority request that meets a full queue: iterations between the next free slot and its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from bench.store import running_store
from noria.engine.engine import Engine
from noria.engine.execution.executor import LocalExecutor
from noria.engine.execution.step import RowOutput, StepInput
from noria.engine.grammar.grammars import Grammars
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.engine_broker import MAX_LEFT
from noria.engine.wire.messages import GenerationRequest, ModelCard, SamplingParams, TokenizerFiles

STEP = 0.03  # seconds of an iteration
SLOTS = 64  # the engine's default
PROMPT = 8  # tokens; the first one tells the requests apart
NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 4096, 16, 1024
CARD = ModelCard(
    id="paced",
    aliases=(),
    created=1,
    max_model_len=MAX_LEN,
    vocab_size=1000,
    kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
    block_size=BLOCK_SIZE,
    eos_token_ids=(999,),
    reserve_output=False,
    policy="paged",
    fingerprint="fp",
)


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration did."""

    ended_at: float  # monotonic
    started: frozenset[int]  # requests, by the first token of their prompts
    num_ended: int  # requests that had their last token


class PacedModel:
    """Takes one step per iteration and `row` seconds for each in it, and keeps a record of every iteration."""

    def __init__(self, row: float) -> None:
        self._row = row
        self.iterations: list[Iteration] = []

    def execute(self, step: StepInput) -> list[RowOutput]:
        time.sleep(STEP + self._row * len(step.rows))
        started = frozenset(row.token_ids[0] for row in step.rows if row.start == 0)
        samplings = [row.sampling for row in step.rows if row.sampling is not None]
        num_ended = sum(s.position - PROMPT + 1 == s.params.max_tokens for s in samplings)
        self.iterations.append(Iteration(time.monotonic(), started, num_ended))
        return [RowOutput((1,) if row.sampling else ()) for row in step.rows]


def serve(url: str, commands: Connection, row: float, max_left: float) -> None:
    """A real loop, scheduler and broker around that model; the iterations go back at the end."""
    scheduler = Scheduler(
        POLICIES["paged"],
        KVBlocks(NUM_BLOCKS, BLOCK_SIZE, True),
        max_batch_size=SLOTS,
        max_batch_tokens=512,
        max_model_len=MAX_LEN,
    )
    model, stop = PacedModel(row), threading.Event()
    broker = EngineBroker(url, CARD.id, lease_seconds=60, max_left=max_left)
    executor = LocalExecutor(model.execute)
    files = TokenizerFiles("{}", None, None, None, False)
    broker.register(CARD, files)
    grammars = Grammars(files, vocab_size=CARD.vocab_size, stop_token_ids=CARD.eos_token_ids)
    thread = threading.Thread(target=Engine(scheduler, executor, broker, CARD, grammars).run, args=(stop,))
    commands.send("ready")
    commands.recv()
    thread.start()
    commands.recv()
    stop.set()
    thread.join()
    executor.close()
    broker.close()
    commands.send(model.iterations)


class PacedEngine:
    """`serve` in a process of its own, as in life: within one process it would share the interpreter with the reader
    of its frames, and both would wait for each other."""

    def __init__(self, url: str, row: float = 0.0, max_left: float = MAX_LEFT) -> None:
        self.iterations: list[Iteration] = []  # once it has closed
        self._commands, child = multiprocessing.Pipe()
        arguments = (url, child, row, max_left)
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self._commands.recv()

    def start(self) -> None:
        self._commands.send("start")

    def close(self) -> None:
        self._commands.send("stop")
        self.iterations = self._commands.recv()
        self._process.join()

    def iterations_to_start(self, number: int, queued_at: float) -> int:
        """From the first iteration that freed a slot after `queued_at` to the one that ran this request first."""
        freed = next(i for i, done in enumerate(self.iterations) if done.ended_at > queued_at and done.num_ended)
        return next(i for i, done in enumerate(self.iterations) if number in done.started) - freed


@dataclass
class Sent:
    """One request's times (monotonic) and its tokens so far."""

    tenant: str
    number: int
    at: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Tenants:
    """A gateway's face without HTTP."""

    def __init__(self, broker: GatewayBroker, engines: Sequence[PacedEngine]) -> None:
        self._broker, self.engines = broker, engines
        self._count = 1
        self.sent: dict[str, Sent] = {}
        self.tokens: dict[str, int] = defaultdict(int)  # by tenant

    def start(self) -> None:
        for engine in self.engines:
            engine.start()

    async def read(self) -> None:
        async for frames in self._broker.frames():
            for frame in frames:
                sent = self.sent[frame.request_id]
                if frame.token_ids and not sent.tokens:
                    sent.first = time.monotonic()
                sent.tokens += len(frame.token_ids)
                sent.last = time.monotonic()
                self.tokens[sent.tenant] += len(frame.token_ids)
                if frame.finish is not None:
                    sent.ended.set()

    async def send(self, tenant: str, *, output: int = 0, weight: float = 1.0, service_class: str = "default") -> Sent:
        """Without `output` it is 16 to 48 tokens, mixed, or all slots would come free in the same iteration."""
        self._count += 1
        output = output or 16 + self._count * 7 % 33
        request_id = f"{tenant}-{self._count}"
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        request = GenerationRequest(
            request_id,
            CARD.id,
            [self._count] * PROMPT,
            sampling,
            self._broker.boot_id,
            tenant=tenant,
            service_class=service_class,
            weight=weight,
        )
        self.sent[request_id] = Sent(tenant, self._count, time.monotonic())
        await self._broker.enqueue(request, CARD)
        return self.sent[request_id]

    async def one_after_another(self, tenant: str, number: int) -> list[float]:
        """Times to first token, in seconds, of requests without a pause between them. Each comes when an iteration has
        just begun, the longest wait there is."""
        waits = []
        for _ in range(number):
            sent = await self.send(tenant, output=4)
            await sent.ended.wait()
            waits.append(sent.first - sent.at)
        return waits


@dataclass(frozen=True)
class Measured:
    """The three figures."""

    alone: float  # seconds, median
    flooded: float
    share: float  # tokens of weight 3 over tokens of weight 1
    iterations_to_start: list[int]  # one per priority request: between the first free slot and its first token

    @property
    def slowdown(self) -> float:
        return self.flooded / self.alone

    @property
    def passed(self) -> bool:
        return self.slowdown <= 2 and abs(self.share / 3 - 1) <= 0.1 and max(self.iterations_to_start) <= 1


async def flood(tenants: Tenants, *, flood_size: int, samples: int) -> tuple[float, float]:
    """Median seconds to B's first token: alone, and while A's flood is there all the time."""
    tenants.start()
    alone = await tenants.one_after_another("B", samples)
    for _ in range(flood_size):
        await tenants.send("A")
    waits = []
    while len(waits) < samples and sum(s.tenant == "A" and not s.ended.is_set() for s in tenants.sent.values()) > SLOTS:
        waits += await tenants.one_after_another("B", 1)
    await all_ended(tenants)
    return statistics.median(alone), statistics.median(waits)


async def shares(tenants: Tenants, *, requests: int) -> float:
    """Tokens of the tenant with weight 3 over those of the one with weight 1, while both are backlogged."""
    for _ in range(requests):
        await tenants.send("one", weight=1)
        await tenants.send("three", weight=3)
    tenants.start()  # now that both have a backlog
    # Until the faster one has nothing waiting any more.
    while sum(s.tenant == "three" and not s.tokens for s in tenants.sent.values()) > 0:
        await asyncio.sleep(STEP)
    one, three = tenants.tokens["one"], tenants.tokens["three"]
    await all_ended(tenants)
    return three / one


async def priority(tenants: Tenants, *, backlog: int, samples: int) -> list[tuple[int, float]]:
    """Numbers of priority requests that met a full queue, and when they were queued (monotonic)."""
    tenants.start()
    for _ in range(backlog):
        await tenants.send("A")
    await asyncio.sleep(20 * STEP)
    found = []
    for _ in range(samples):
        sent = await tenants.send("P", output=4, service_class="priority")
        queued_at = time.monotonic()
        await sent.ended.wait()
        found.append((sent.number, queued_at))
        await asyncio.sleep(3 * STEP)
    await all_ended(tenants)
    return found


async def all_ended(tenants: Tenants) -> None:
    for sent in list(tenants.sent.values()):
        await sent.ended.wait()


@asynccontextmanager
async def world(url: str, *engines: PacedEngine) -> AsyncIterator[Tenants]:
    """These engines, or one, and a gateway's face on this store."""
    engines = engines or (PacedEngine(url),)
    broker = GatewayBroker(url)
    await broker.start()
    tenants = Tenants(broker, engines)
    reading = asyncio.create_task(tenants.read())
    try:
        yield tenants
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await broker.close()
        for engine in engines:
            await asyncio.to_thread(engine.close)


async def measure(url: str, *, flood_size: int, samples: int) -> Measured:
    async with world(url) as tenants:
        alone, flooded = await flood(tenants, flood_size=flood_size, samples=samples)
    async with world(url) as tenants:
        share = await shares(tenants, requests=flood_size // 3)
    async with world(url) as tenants:
        urgent = await priority(tenants, backlog=max(100, flood_size // 3), samples=max(3, samples // 4))
    iterations = [tenants.engines[0].iterations_to_start(number, queued_at) for number, queued_at in urgent]
    return Measured(alone, flooded, share, iterations)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flood", type=int, default=500, help="requests of tenant A")
    parser.add_argument("--samples", type=int, default=24, help="requests of tenant B, alone and in the flood")
    options = parser.parse_args(arguments)
    with running_store() as store:
        found = asyncio.run(measure(store.url, flood_size=options.flood, samples=options.samples))
    print(f"{'':44}  {'measured':>10}  {'bar':>12}")
    print(f"{'B alone, median time to first token':44}  {1000 * found.alone:>7.1f} ms")
    print(f"{'B while A floods':44}  {1000 * found.flooded:>7.1f} ms")
    print(f"{'B, flooded over alone':44}  {found.slowdown:>9.2f}x  {'<= 2x':>12}")
    print(f"{'tokens of weight 3 over tokens of weight 1':44}  {found.share:>10.2f}  {'2.70 - 3.30':>12}")
    most = max(found.iterations_to_start)
    print(f"{'iterations from a free slot to priority':44}  {most:>10}  {'<= 1':>12}")
    print("passed" if found.passed else "failed")
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
