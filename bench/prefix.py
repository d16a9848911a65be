"""What a shared beginning saves: `python -m bench.prefix`.

Time to the first token of requests with one 400-token system prompt, first and later ones; and the blocks that eight
choices of one prompt hold. In this process, without store and HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter

from rich.console import Console

from noria.engine.config import DEMO_MODEL, EngineConfig
from noria.engine.offline import OfflineEngine
from noria.engine.wire.messages import SamplingParams

SYSTEM, QUESTION, ROUNDS = 400, 24, 7
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0)
BAR = 0.35
"""Of the first request's time to its first token, the second's must stay below."""


@dataclass(frozen=True, slots=True)
class Found:
    first: float  # seconds, median
    second: float
    blocks_of_one: int
    blocks_of_eight: int


def seconds(engine: OfflineEngine, prompt: list[int]) -> float:
    started = perf_counter()
    engine.generate([prompt], FIRST_TOKEN)
    return perf_counter() - started


def blocks_held(engine: OfflineEngine, prompts: Sequence[list[int]]) -> int:
    """The most blocks held at once while 8 tokens are generated for each prompt."""
    scheduler, most = engine._scheduler, 0
    select = scheduler.select

    def counting():  # type: ignore[no-untyped-def]
        nonlocal most
        batch = select()
        most = max(most, scheduler.kv.num_held)
        return batch

    scheduler.select = counting  # type: ignore[method-assign]
    engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    scheduler.select = select  # type: ignore[method-assign]
    return most


def measure(model: str = DEMO_MODEL, rounds: int = ROUNDS) -> Found:
    engine, chance = OfflineEngine(EngineConfig(model=model, kv_memory="256MiB", max_model_len=1024)), Random(0)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(1, engine.card.vocab_size) for _ in range(count)]

    first, second = [], []
    for _ in range(rounds):
        system = tokens(SYSTEM)
        first.append(seconds(engine, system + tokens(QUESTION)))
        second.append(seconds(engine, system + tokens(QUESTION)))
    prompt = tokens(SYSTEM + 8)
    one, eight = blocks_held(engine, [prompt]), blocks_held(engine, [tokens(SYSTEM + 8)] * 8)
    engine.close()
    return Found(median(first), median(second), one, eight)


def main() -> None:
    found = measure()
    console = Console()
    console.print(
        f"first token after {SYSTEM} + {QUESTION} prompt tokens: {found.first:.3f} s; with the {SYSTEM} cached: "
        f"{found.second:.3f} s, {found.second / found.first:.0%} of it (bar: {BAR:.0%})"
    )
    console.print(
        f"blocks held by one choice of {SYSTEM + 8} tokens: {found.blocks_of_one}; by eight: {found.blocks_of_eight}, "
        f"where {8 * found.blocks_of_one} would be held without sharing"
    )


if __name__ == "__main__":
    main()
