"""The README's picture, from a run of the real model: twelve requests over five slots, under `paged` and `static`.

python -m bench.carousel docs/images/carousel.svg
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from random import Random
from typing import Literal

from noria.engine.config import DEMO_MODEL, EngineConfig
from noria.engine.offline import OfflineEngine
from noria.engine.wire.messages import SamplingParams
from noria.trace_file import Trace, read
from noria.trace_picture import draw

POLICIES: tuple[Literal["paged", "static"], ...] = ("paged", "static")
PROMPTS = (12, 20, 40, 80, 130)  # tokens
OUTPUTS = (6, 44)


def run(policy: Literal["static", "orca", "paged"], file: Path, model: str, kv_memory: str, seed: int) -> Trace:
    """All requests at once, so that the slots are what they wait for."""
    chance = Random(seed)
    lengths = [(chance.choice(PROMPTS), chance.randint(*OUTPUTS)) for _ in range(12)]
    engine = OfflineEngine(
        EngineConfig(
            model=model, policy=policy, max_batch_size=5, max_batch_tokens=48, max_model_len=1024,
            kv_memory=kv_memory, trace_iterations=str(file),
        )
    )  # fmt: skip
    try:
        engine.generate(
            [[chance.randrange(engine.card.vocab_size) for _ in range(prompt)] for prompt, _ in lengths],
            [SamplingParams(max_tokens=output, temperature=0, ignore_eos=True) for _, output in lengths],
        )
    finally:
        engine.close()
    return read(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="PNG or SVG")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--kv-memory", default="24MiB")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        traces = [
            run(policy, Path(folder) / policy, options.model, options.kv_memory, options.seed) for policy in POLICIES
        ]
    draw(traces, options.picture)


if __name__ == "__main__":
    main()
