"""What prompt-lookup speculation gives: `python -m bench.speculation`.

The same requests with `--speculate ngram` and without, in turns: tokens per second, acceptance, and whether the tokens
are the same (they must be). In this process, without store and HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from noria.engine.config import DEMO_MODEL, EngineConfig
from noria.engine.offline import OfflineEngine
from noria.engine.wire.messages import SamplingParams
from noria.engine.wire.tokenizer import Tokenizer

LIST = "apples, pears, plums, grapes, figs, dates, limes, lemons, melons, cherries"
TASKS = {
    "repeats its prompt": f"Copy this list three times: {LIST}.\n1. {LIST}\n2. {LIST}\n3. apples,",
    "code": "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "class Line:\n    def __init__(self, start, end):\n        self.start = start\n        self.end = end\n\n"
    "class Circle:\n",
    "free text": "Once upon a time there was a lighthouse keeper who",
}
SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.7, "seed": 4}}
TOKENS, ROUNDS = 48, 3


@dataclass(slots=True)
class Figures:
    seconds: list[float]
    tokens: list[list[int]]
    drafted: int = 0
    accepted: int = 0


def run(engine: OfflineEngine, prompt: list[int], copies: int, sampling: dict[str, float]) -> Figures:
    counts = engine._scheduler.speculation
    drafted, accepted = counts.drafted, counts.accepted
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    started = perf_counter()
    done = engine.generate([prompt] * copies, params)
    seconds = perf_counter() - started
    return Figures([seconds], [g.token_ids for g in done], counts.drafted - drafted, counts.accepted - accepted)


def main() -> None:
    settings = {"model": DEMO_MODEL, "kv_memory": "128MiB", "max_model_len": 1024}
    plain = OfflineEngine(EngineConfig(**settings))  # type: ignore[arg-type]
    guessing = OfflineEngine(EngineConfig(**settings, speculate="ngram"))  # type: ignore[arg-type]
    tokenizer = Tokenizer.load(plain.tokenizer_files)
    table = Table("task", "requests", "sampling", "tokens/s", "with ngram", "gain", "guessed", "right", "same tokens")
    for task, text in TASKS.items():
        prompt = tokenizer.encode(text)
        for copies, name in ((1, "greedy"), (1, "sampled"), (4, "greedy")):
            pairs = [
                tuple(run(engine, prompt, copies, SAMPLINGS[name]) for engine in (plain, guessing))
                for _ in range(ROUNDS)
            ]
            without, with_ngram = (median(figures[side].seconds[0] for figures in pairs) for side in (0, 1))
            last = pairs[-1][1]
            table.add_row(
                task,
                str(copies),
                name,
                f"{copies * TOKENS / without:.1f}",
                f"{copies * TOKENS / with_ngram:.1f}",
                f"{without / with_ngram:.2f}x",
                str(last.drafted),
                f"{last.accepted / last.drafted:.0%}" if last.drafted else "-",
                "yes" if all(a.tokens == b.tokens for a, b in pairs) else "NO",
            )
    Console(width=120).print(table)
    plain.close()
    guessing.close()


if __name__ == "__main__":
    main()
