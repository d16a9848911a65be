"""Do the engines of one pool share its work? Real brokers and loops; the model sleeps, longer for a larger batch.

    python -m bench.balance

Bursts of requests meet two idle engines, by turns with the rule that work goes to the engine that holds least and
without it. For each: the largest share of one engine, the median time to the first token, and the time to the last one
of the burst; medians of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass

from bench.fairness import PacedEngine, Tenants, all_ended, world
from bench.store import running_store
from noria.engine.wire.engine_broker import MAX_LEFT

ROW = 0.002  # seconds that each request adds to an iteration of 30 ms
OUTPUT = 24  # tokens
PAUSE = 0.2  # seconds between two bursts, for engines to be idle


@dataclass(frozen=True, slots=True)
class Burst:
    """Which requests it was, by number, and its times in seconds."""

    numbers: frozenset[int]
    to_first: float
    to_last: float


async def burst(tenants: Tenants, size: int) -> Burst:
    sent = [await tenants.send("A", output=OUTPUT) for _ in range(size)]
    await all_ended(tenants)
    await asyncio.sleep(PAUSE)
    return Burst(
        frozenset(s.number for s in sent),
        statistics.median(s.first - s.at for s in sent),
        max(s.last for s in sent) - sent[0].at,
    )


async def bursts(url: str, sizes: list[int], num_engines: int, max_left: float) -> dict[int, tuple[float, Burst]]:
    """By size: the largest share of one engine, and the burst."""
    engines = [PacedEngine(url, ROW, max_left) for _ in range(num_engines)]
    async with world(url, *engines) as tenants:
        tenants.start()
        await asyncio.sleep(PAUSE)
        await burst(tenants, num_engines)  # everything has been used once
        found = {size: await burst(tenants, size) for size in sizes}
    started = [frozenset[int]().union(*(i.started for i in engine.iterations)) for engine in engines]
    return {n: (max(len(s & one.numbers) for s in started) / n, one) for n, one in found.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[12, 16, 64], help="requests of a burst")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    found: dict[tuple[int, bool], list[tuple[float, Burst]]] = defaultdict(list)
    for _ in range(options.rounds):
        for balanced in (False, True):
            with running_store() as store:
                of_round = bursts(store.url, options.sizes, options.engines, MAX_LEFT if balanced else 0.0)
                for size, one in asyncio.run(of_round).items():
                    found[size, balanced].append(one)
    print(f"{'burst':>6}{'rule':>8}{'largest share':>24}{'first token, s':>16}{'last token, s':>15}{'ratio':>8}")
    for size in options.sizes:
        without = statistics.median(one.to_last for _, one in found[size, False])
        for balanced in (False, True):
            shares, times = zip(*found[size, balanced], strict=True)
            share = f"{statistics.median(shares):.2f} ({min(shares):.2f} - {max(shares):.2f})"
            last = statistics.median(one.to_last for one in times)
            first = statistics.median(one.to_first for one in times)
            figures = f"{first:>16.3f}{last:>15.2f}{last / without:>8.2f}"
            print(f"{size:>6}{'yes' if balanced else 'no':>8}{share:>24}{figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
