"""What watching the wheel costs an engine: `python -m bench.wheel [--model tiny|ALIAS] [--rows 64]`.

One engine with a full batch; watched and unwatched spells take turns in one run, so that the machine's
moods hit both alike. Knows no gateway: the watcher is a subscription.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.store import running_store
from bench.tiny_model import make
from noria.engine.assembly import assemble
from noria.engine.config import EngineConfig
from noria.engine.engine import Engine
from noria.engine.plan import plan
from noria.engine.wheel import Wheel
from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.messages import GenerationRequest, ModelCard, SamplingParams
from noria.engine.wire.wheel import WheelChannel, WheelNews

WATCH = """
import asyncio, sys
from noria.engine.wire.wheel import WheelSubscription
async def watch():
    async for message in WheelSubscription(sys.argv[1]).news():
        print(len(message), flush=True)
asyncio.run(watch())
"""
"""A watcher in a process of its own, as a gateway is."""

SPELLS = 6
SPELL = 4.0  # seconds
SETTLE = 1.5  # seconds until an engine knows whether it is watched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny (random weights), an alias, a folder or a GGUF file")
    parser.add_argument("--rows", type=int, default=64)
    given = parser.parse_args()
    rows, tiny = given.rows, given.model == "tiny"
    with running_store() as store, tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(make(Path(folder) / "tiny", max_len=16384)) if tiny else given.model,
            redis_url=store.url,
            max_batch_size=rows,
            max_model_len=16384 if tiny else 2048,
            kv_memory="2GiB",
            threads=1,
        )
        planned = plan(config)
        assembly = assemble(planned)
        broker = EngineBroker(store.url, assembly.card.id)
        broker.register(assembly.card, assembly.tokenizer_files)
        bare = WheelNews(planned.name, broker.engine_id, "paged", rows, planned.num_blocks, 16, 0.0, [], [])
        wheel = Wheel(WheelChannel(store.url, planned.name), bare)
        engine = Engine(assembly.scheduler, assembly.executor, broker, assembly.card, assembly.grammars, wheel=wheel)
        stop = threading.Event()
        thread = threading.Thread(target=engine.run, args=(stop,), name="loop")
        thread.start()
        try:
            asyncio.run(_measure(store.url, assembly.card, engine, wheel, rows))
        finally:
            stop.set()
            thread.join()
            wheel.close()
            assembly.close()
            broker.close()


async def _measure(url: str, card: ModelCard, engine: Engine, wheel: Wheel, rows: int) -> None:
    gateway = GatewayBroker(url)
    await gateway.start()
    sampling = SamplingParams(max_tokens=card.max_model_len - 100, temperature=0, ignore_eos=True)
    for index in range(rows):
        prompt = [1 + index % 90, *range(1, 20)]
        await gateway.enqueue(GenerationRequest(f"r{index}", card.id, prompt, sampling, gateway.boot_id), card)
    reading = asyncio.create_task(_drain(gateway))
    while engine.statistics.record().running < rows:
        await asyncio.sleep(0.1)
    rates: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[float]] = {False: [], True: []}  # CPU seconds of the loop for an iteration
    shown = 0.0  # CPU seconds of the wheel's thread while it was watched
    loop, turning = (cpu_clock(name) for name in ("loop", "noria-wheel"))
    heard: list[int] = []
    for spell in range(2 * SPELLS + 1):
        watched = bool(spell % 2)
        command = (sys.executable, "-c", WATCH, url)
        watching = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) if watched else None
        await asyncio.sleep(3.0)
        assert wheel.watched is watched
        before, began, loop_began, turning_began = _iterations(engine), time.perf_counter(), loop(), turning()
        await asyncio.sleep(SPELL)
        number = _iterations(engine) - before
        rates[watched].append(number / (time.perf_counter() - began))
        costs[watched].append((loop() - loop_began) / number)
        shown += (turning() - turning_began) * watched
        if watching is not None:
            watching.terminate()
            heard += map(int, (await watching.communicate())[0].split())
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await gateway.close()
    # Contexts grow, so iterations do: each watched spell is held against the two beside it.
    print(f"{rows} rows; iterations per second from {rates[False][0]:.1f} to {rates[False][-1]:.1f} as contexts grow")
    for what, ratios in (
        ("time", [1 / ratio for ratio in _ratios(rates)]),
        ("CPU time of the loop", _ratios(costs)),
    ):
        told = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{what} of an iteration, watched over unwatched: {told}")
    print(f"CPU of the wheel's thread while watched: {shown / (SPELLS * SPELL):.2%} of a core")
    print(f"messages heard: {len(heard)}, median size {median(heard) / 1024:.1f} KiB")


def cpu_clock(name: str) -> Callable[[], float]:
    """CPU seconds that the thread of that name has had: whatever else the machine does."""
    (thread,) = (t for t in threading.enumerate() if t.name == name)
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.clock_gettime(clock)


def _iterations(engine: Engine) -> int:
    return engine.statistics.record().iterations_total


def _ratios(found: dict[bool, list[float]]) -> list[float]:
    plain = found[False]
    return [seen / ((a + b) / 2) for a, seen, b in zip(plain, found[True], plain[1:], strict=False)]


async def _drain(gateway: GatewayBroker) -> None:
    async for _ in gateway.frames():
        pass


if __name__ == "__main__":
    main()
