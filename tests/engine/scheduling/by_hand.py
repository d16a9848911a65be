"""Schedulers and requests small enough to be followed by hand. The model says its own position: what matters is who
steps when."""

from __future__ import annotations

from noria.engine.scheduling.batch import Batch, Progress
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler


def scheduler_of(
    policy: str,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    batch: int = 4,
    tokens: int = 64,
    chunk: int = 0,
    cache: bool = False,
    stages: int = 1,
    windows: tuple[int, ...] = (0,),
) -> Scheduler:
    max_step = POLICIES[policy].max_step(tokens, 0)
    kv = KVBlocks(num_blocks, block_size, cache, windows, max_step)
    return Scheduler(
        POLICIES[policy],
        kv,
        max_batch_size=batch,
        max_batch_tokens=tokens,
        max_chunk_tokens=chunk,
        max_model_len=1000,
        num_stages=stages,
    )


def request_of(name: str, prompt: int = 4, max_tokens: int = 4, *, rank: int = 1, first: int = 0) -> Request:
    return Request(name, list(range(first, first + prompt)), prompt, max_tokens, class_rank=rank)


def finish(scheduler: Scheduler, batch: Batch) -> list[Progress]:
    progress = scheduler.complete(batch, [[row.request.num_tokens] if row.samples else [] for row in batch.rows])
    scheduler.check()
    return progress


def step(scheduler: Scheduler) -> tuple[str, str]:
    """One iteration: names of the rows (padding in brackets), names of those that end."""
    batch = scheduler.select()
    assert batch is not None
    rows = " ".join(f"[{row.request.id}]" if row.is_padding else row.request.id for row in batch.rows)
    return rows, " ".join(p.request.id for p in finish(scheduler, batch) if p.finish is not None)


def run(scheduler: Scheduler) -> list[str]:
    """Iterate until everybody has ended; the names in the order of their ends."""
    ended: list[str] = []
    for _ in range(1000):
        if not len(scheduler):
            assert scheduler.kv.num_free == scheduler.kv.num_blocks
            return ended
        ended.extend(step(scheduler)[1].split())
    raise AssertionError(f"{scheduler.running} and {scheduler.waiting} never end")
