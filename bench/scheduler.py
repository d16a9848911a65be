"""The scheduler's own time per iteration, with no model and with every feature on: `python bench/scheduler.py`.

Rows decode from the middle of their outputs, as in a full engine; each figure is the median over many iterations.
"""

from __future__ import annotations

from statistics import median, quantiles
from time import thread_time

from rich.console import Console
from rich.table import Table

from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler

BARS = {64: 300, 256: 1500}
"""Microseconds of select + complete that must not be passed, by rows."""

PROMPT, OUTPUT = 128, 10_000
ITERATIONS = 2_000


def full_engine(policy: str, num_rows: int) -> Scheduler:
    """An engine in the middle of decoding `num_rows` requests whose prompts are read."""
    blocks = num_rows * (-(-(PROMPT + OUTPUT) // 16))
    kv = KVBlocks(blocks, 16, prefix_cache=policy == "paged")
    scheduler = Scheduler(
        POLICIES[policy],
        kv,
        max_batch_size=num_rows,
        max_batch_tokens=8192,
        max_model_len=PROMPT + OUTPUT,
        max_draft=6 if policy == "paged" else 0,
    )
    for index in range(num_rows):
        prompt = [index, *range(1, PROMPT)]
        scheduler.add(Request(f"r{index}", prompt, PROMPT, OUTPUT, stop_ids=frozenset({-1})))
    while any(request.num_output < 2 for request in scheduler.running + scheduler.waiting):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float]:
    """CPU seconds of select and of complete (what else the machine does is not theirs)."""
    start = thread_time()
    batch = scheduler.select()
    selected = thread_time()
    assert batch is not None
    sampled = [(7,) if row.samples else () for row in batch.rows]
    ready = thread_time()
    scheduler.complete(batch, sampled)
    return selected - start, thread_time() - ready


def main() -> None:
    table = Table(title="scheduler time per iteration, microseconds")
    for heading in ("policy", "rows", "select", "complete", "both p50", "both p99", "bar"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for policy in POLICIES:
        for num_rows, bar in BARS.items():
            scheduler = full_engine(policy, num_rows)
            times = [step(scheduler) for _ in range(ITERATIONS)]
            both = [1e6 * (select + complete) for select, complete in times]
            select, complete = (1e6 * median(column) for column in zip(*times, strict=True))
            figures = (select, complete, median(both), quantiles(both, n=100)[98])
            table.add_row(policy, str(num_rows), *(f"{figure:.0f}" for figure in figures), str(bar))
    Console().print(table)


if __name__ == "__main__":
    main()
