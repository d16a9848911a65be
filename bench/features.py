"""Whether the real model's answers depend on the engine's features (they must not): `python -m bench.features`.

Greedy and seeded requests alone, and then together under each feature, in a pool that holds two of them, and with
preemption at random moments. The fast version on a tiny model is tests/engine/test_features.py.
"""

from __future__ import annotations

from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from noria.engine.config import DEMO_MODEL, EngineConfig
from noria.engine.offline import OfflineEngine
from noria.engine.scheduling.batch import Batch
from noria.engine.wire.messages import SamplingParams
from noria.engine.wire.tokenizer import Tokenizer

SYSTEM = "You are a helpful assistant. Answer in one short sentence and say nothing that was not asked. "
QUESTIONS = (
    "What is the capital of France?",
    "Count from one to twelve: one, two, three,",
    "Repeat: red blue green red blue green red blue",
    "Name a fruit that is yellow.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):",
    "Why is the sky blue?",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.6, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.4},
)
TOKENS = 32
NGRAM = {"speculate": "ngram"}
FEATURES: dict[str, dict[str, Any]] = {
    "prefix cache": {},
    "orca": {"policy": "orca"},
    "static": {"policy": "static"},
    "chunks of 32 tokens, 4 rows": {"max_batch_size": 4, "max_batch_tokens": 32},
    "ngram": NGRAM,
    "ngram, chunks of 32, 4 rows": NGRAM | {"max_batch_size": 4, "max_batch_tokens": 32},
    "a pool of 11 blocks": {"kv_memory": "4MiB", "max_model_len": 128},
    "ngram, a pool of 11 blocks": NGRAM | {"kv_memory": "4MiB", "max_model_len": 128},
}


def engine_of(**options: Any) -> OfflineEngine:
    return OfflineEngine(EngineConfig(model=DEMO_MODEL, **{"kv_memory": "128MiB", "max_model_len": 256, **options}))


def preempt_now_and_then(engine: OfflineEngine) -> None:
    """From now on every request loses its blocks with a chance of 5 % an iteration."""
    scheduler, chance = engine._scheduler, Random(5)
    select = scheduler.select

    def disturbed() -> Batch | None:
        for request in list(scheduler.running):
            if chance.random() < 0.05:
                scheduler._admission.preempt(request)
        return select()

    scheduler.select = disturbed  # type: ignore[method-assign]


def main() -> None:
    plain = engine_of(prefix_cache=False)
    tokenizer = Tokenizer.load(plain.tokenizer_files)
    prompts = [tokenizer.encode(SYSTEM + question) for question in QUESTIONS for _ in SAMPLINGS]
    params = [SamplingParams(max_tokens=TOKENS, **sampling) for _ in QUESTIONS for sampling in SAMPLINGS]
    alone = [plain.generate([prompt], p)[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    plain.close()
    table = Table("feature", "same answers", "preemptions", "guessed", "right")
    random_preemption = {f"{name}, preempted at random": options for name, options in (("cache", {}), ("ngram", NGRAM))}
    for name, options in (FEATURES | random_preemption).items():
        engine = engine_of(**options)
        if name in random_preemption:
            preempt_now_and_then(engine)
        together = [generated.token_ids for generated in engine.generate(prompts, params)]
        same = sum(a == b for a, b in zip(alone, together, strict=True))
        counts, scheduler = engine._scheduler.speculation, engine._scheduler
        preemptions = scheduler.preemptions.memory or ("-" if name not in random_preemption else "random")
        table.add_row(name, f"{same} of {len(alone)}", str(preemptions), str(counts.drafted), str(counts.accepted))
        engine.close()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
