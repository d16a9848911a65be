"""The ranks of one model as threads of this process, over real channels: what processes would do, in a tenth of the
time."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._distributed_c10d import HashStore

from noria.engine.config import EngineConfig, Rendezvous
from noria.engine.execution.control import Hello, Line
from noria.engine.execution.ranks import RankExecutor
from noria.engine.execution.rendezvous import Joined, Meeting
from noria.engine.plan import Plan, plan
from noria.engine.ranks import start_ranks
from noria.engine.worker import Rank


@dataclass
class ThreadRanks:
    """`lines` are the far ends of the control channels, by rank."""

    executor: RankExecutor
    plan: Plan
    ranks: dict[int, Rank]
    lines: dict[int, Line]


@contextmanager
def thread_ranks(config: EngineConfig) -> Iterator[ThreadRanks]:
    size = config.tp * config.pp
    store = HashStore()

    def given(rank: int) -> Rendezvous:
        return Rendezvous(rank=rank, world_size=size, local_world_size=size, master_addr="here", master_port=1)

    hellos, near, far, ranks = [], {}, {}, {}
    for rank in range(1, size):
        planned = plan(config, given(rank))
        ours, theirs = multiprocessing.Pipe()
        near[rank], far[rank] = Line(ours), Line(theirs)
        ranks[rank] = Rank(planned, Joined(store, "127.0.0.1", far[rank]))
        hellos.append(Hello(rank, planned.num_blocks, "here"))
        threading.Thread(target=ranks[rank].serve, name=f"rank{rank}", daemon=True).start()
    meeting = Meeting(store, "127.0.0.1", hellos, near, {})
    executor, _, agreed = start_ranks(plan(config, given(0)), meeting)
    try:
        yield ThreadRanks(executor, agreed, ranks, far)
    finally:
        executor.close()
