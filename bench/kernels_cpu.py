"""What a whole step of the demo model costs on each backend of the CPU: `python -m bench.kernels_cpu [--rounds N]`.

Backends take turns, so that a noisy machine disturbs both. Prints medians in ms and the ratio of plain torch to native.
"""

from __future__ import annotations

import argparse
import statistics
import time

from noria.engine.assembly import assemble
from noria.engine.config import EngineConfig
from noria.engine.execution.executor import LocalExecutor
from noria.engine.execution.step import RowInput, Sampling, StepInput
from noria.engine.plan import plan
from noria.engine.wire.messages import SamplingParams

BACKENDS = ("native", "torch")
CONTEXT = 64  # tokens that each decode row attends to
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


def decode_step(num_rows: int) -> StepInput:
    blocks = CONTEXT // 16
    rows = [
        RowInput([100 + i], CONTEXT - 1, list(range(i * blocks, (i + 1) * blocks)), Sampling(GREEDY, CONTEXT))
        for i in range(num_rows)
    ]
    return StepInput(rows, num_rows)


def prompt_step(length: int) -> StepInput:
    return StepInput([RowInput(list(range(length)), 0, list(range(length // 16)), Sampling(GREEDY, length))], 0)


STEPS = {
    "1 row": decode_step(1),
    "16 rows": decode_step(16),
    "64 rows": decode_step(64),
    "prompt of 512": prompt_step(512),
}


def seconds(executor: LocalExecutor, step: StepInput) -> float:
    started = time.perf_counter()
    executor.run(step)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    executors = {
        name: assemble(plan(EngineConfig(kernels=name, kv_memory="256MiB"))).executor  # type: ignore[arg-type]
        for name in BACKENDS
    }
    print(f"{'step':16}" + "".join(f"{name:>12}" for name in BACKENDS) + f"{'ratio':>8}")
    for label, step in STEPS.items():
        taken: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for _ in range(options.rounds):
            for name, executor in executors.items():
                taken[name].append(seconds(executor, step))
        native, torch = (statistics.median(taken[name][1:]) * 1000 for name in BACKENDS)
        print(f"{label:16}{native:9.1f} ms{torch:9.1f} ms{torch / native:7.2f}x")


if __name__ == "__main__":
    main()
