"""What it gives that a full engine exchanges with the queue while it computes: `python -m bench.overlap`.

Real store, broker, scheduler and loop; the model only takes a time, as one on another device would. The loop with and
without overlap in turns, median of 7 rounds.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from rich.console import Console

from bench.fairness import store
from noria.engine.engine import Engine
from noria.engine.execution.executor import LocalExecutor
from noria.engine.execution.step import RowOutput, StepInput
from noria.engine.grammar.grammars import Grammars
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.messages import GenerationRequest, ModelCard, SamplingParams, TokenizerFiles

ROWS, TURNS, ROUNDS = 64, 60, 7
PACES = (0.005, 0.02, 0.1)  # seconds that an iteration computes
CARD = ModelCard(
    id="paced",
    aliases=(),
    created=1,
    max_model_len=4096,
    vocab_size=1000,
    kv_tokens=ROWS * 4096,
    block_size=16,
    eos_token_ids=(999,),
    reserve_output=False,
    policy="paged",
    fingerprint="paced",
)
FILES = TokenizerFiles("{}", None, None, None, False)


class Eager(Scheduler):
    """Says that it is full as it is told."""

    told = False

    @property
    def is_full(self) -> bool:
        return self.told


def loop(engine: Engine, scheduler: Eager) -> tuple[float, float]:
    """Seconds of an iteration without and with overlap."""
    while len(scheduler.running) < ROWS:
        engine.step()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for scheduler.told in seconds:
            started = time.perf_counter()
            for _ in range(TURNS):
                engine.step()
            seconds[scheduler.told].append((time.perf_counter() - started) / TURNS)
    return median(seconds[False]), median(seconds[True])


async def measure(url: str, pace: float) -> tuple[float, float]:
    gateway = GatewayBroker(url)
    await gateway.start()

    async def read() -> None:
        async for _ in gateway.frames():
            pass

    def execute(step: StepInput) -> list[RowOutput]:
        time.sleep(pace)
        return [RowOutput((7,) if row.sampling else ()) for row in step.rows]

    reading = asyncio.create_task(read())
    kv = KVBlocks(ROWS * 256, 16, prefix_cache=True)
    limits: dict[str, Any] = {"max_batch_size": ROWS, "max_batch_tokens": 8192, "max_model_len": 4096}
    scheduler, executor = Eager(POLICIES["paged"], kv, **limits), LocalExecutor(execute)
    broker = EngineBroker(url, CARD.id)
    broker.register(CARD, FILES)
    grammars = Grammars(FILES, vocab_size=CARD.vocab_size, stop_token_ids=CARD.eos_token_ids)
    for index in range(ROWS):
        sampling = SamplingParams(max_tokens=4000)
        request = GenerationRequest(f"{pace}/{index}", CARD.id, [1, 2, 3, index], sampling, gateway.boot_id)
        await gateway.enqueue(request, CARD)
    found = await asyncio.to_thread(loop, Engine(scheduler, executor, broker, CARD, grammars), scheduler)
    reading.cancel()
    executor.close()
    grammars.close()
    broker.close()
    await gateway.close()
    return found


async def main() -> None:
    console = Console()
    with store() as url:
        for pace in PACES:
            without, with_overlap = (1e3 * seconds for seconds in await measure(url, pace))
            console.print(
                f"{ROWS} rows, {1e3 * pace:.0f} ms of computing: {without:.2f} ms an iteration, with overlap "
                f"{with_overlap:.2f} ms, {without / with_overlap:.3f}x"
            )


if __name__ == "__main__":
    asyncio.run(main())
