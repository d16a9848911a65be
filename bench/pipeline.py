"""What several batches in flight give (Orca, section 4.3): two stages of the real model, each on a core of its own.

    python -m bench.pipeline --rows 8

The same two batches take turns over the same two processes: once a batch is sent off while the one before is still on
its way, once each is waited for before the next. In turns, median of the rounds. The last line has both batches as one,
which is waited for: what that design would rather do.
"""

from __future__ import annotations

import argparse
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from noria.engine.assembly import assemble
from noria.engine.config import DEMO_MODEL, EngineConfig
from noria.engine.execution.executor import Executor
from noria.engine.execution.ranks import RankExecutor
from noria.engine.execution.step import RowInput, Sampling, StepInput
from noria.engine.plan import plan
from noria.engine.wire.messages import SamplingParams

PROMPT, TURNS, ROUNDS = 32, 8, 9
GREEDY = SamplingParams(max_tokens=1, temperature=0)


class Batch:
    """Rows that decode for ever, each from a prompt of its own."""

    def __init__(self, first: int, num_rows: int, blocks_each: int, block_size: int) -> None:
        self._size = block_size
        self._blocks = [list(range(r * blocks_each, (r + 1) * blocks_each)) for r in range(first, first + num_rows)]
        self._last: list[list[int]] = [[7 + (31 * r + i) % 900 for i in range(PROMPT)] for r in range(num_rows)]
        self._start = 0

    def step(self) -> StepInput:
        end = self._start + len(self._last[0])
        rows = [
            RowInput(tokens, self._start, blocks[: -(-end // self._size)], Sampling(GREEDY, end))
            for tokens, blocks in zip(self._last, self._blocks, strict=True)
        ]
        return StepInput(rows, len(rows) if self._start else 0)

    def take(self, tokens: Sequence[tuple[int, ...]]) -> None:
        self._start += len(self._last[0])
        self._last = [list(t) for t in tokens]


def run(executor: Executor, batches: Sequence[Batch], depth: int, turns: int) -> float:
    """Seconds for `turns` iterations of each batch, with `depth` of them out."""
    began = perf_counter()
    coming = [batch for _ in range(turns) for batch in batches]
    out: deque[Batch] = deque()
    while coming or out:
        while coming and len(out) < depth:
            out.append(coming.pop(0))
            executor.submit(out[-1].step())
        out.popleft().take([output.token_ids for output in executor.collect()])
    return perf_counter() - began


def pin(pid: int, core: int) -> None:
    """All threads of a process, and those that they start, to one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="rows of a batch")
    options = parser.parse_args()
    config = EngineConfig(model=options.model, pp=2, threads=1, kv_memory="256MiB", max_model_len=2048)
    planned = plan(config)
    assembly = assemble(planned)
    executor = assembly.executor
    assert isinstance(executor, RankExecutor)
    for core, pid in zip(sorted(os.sched_getaffinity(0)), [os.getpid(), *executor.pids], strict=False):
        pin(pid, core)
    table = Table("rows of a batch", "two in flight", "each waited for", "gain", "both as one", "gain")
    blocks_each = -(-(PROMPT + 4 * TURNS * ROUNDS) // config.block_size) + 1
    for num_rows in options.rows:
        pair = [Batch(i * num_rows, num_rows, blocks_each, config.block_size) for i in range(2)]
        one = [Batch(0, 2 * num_rows, blocks_each, config.block_size)]
        run(executor, pair, 1, 1)  # prompts
        tokens = 2 * num_rows * TURNS
        rounds = [(run(executor, pair, 2, TURNS), run(executor, pair, 1, TURNS)) for _ in range(ROUNDS)]
        run(executor, one, 1, 1)
        singles = [run(executor, one, 1, TURNS) for _ in range(3)]
        piped, waited, joined = median(p for p, _ in rounds), median(w for _, w in rounds), median(singles)
        table.add_row(
            str(num_rows),
            f"{tokens / piped:.1f} tok/s",
            f"{tokens / waited:.1f} tok/s",
            f"{median(w / p for p, w in rounds):.2f}",
            f"{tokens / joined:.1f} tok/s",
            f"{joined / piped:.2f}",
        )
    assembly.close()
    Console().print(table)


if __name__ == "__main__":
    main()
