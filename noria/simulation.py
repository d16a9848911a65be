"""The real scheduler on a virtual clock: what each policy makes of a workload when an iteration costs so and so.

Knows no model, no transport and no terminal; what an iteration costs is the cost model's word.
"""

from __future__ import annotations

from dataclasses import dataclass

from noria.costs import CostModel
from noria.engine.scheduling.batch import Batch
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.replay import TOKEN, Replay, Result, Workload

LONGEST = 2**31 - 1
"""Tokens of a context that never ends."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The scheduler's settings."""

    max_batch_size: int = 16
    max_batch_tokens: int = 512
    max_chunk_tokens: int = 32
    num_blocks: int = 1024
    block_size: int = 16
    windows: tuple[int, ...] = (0,)  # of each group of layers, tokens; 0: they see everything

    def scheduler(self, policy: str) -> Scheduler:
        max_step = POLICIES[policy].max_step(self.max_batch_tokens, 0)
        # Prompts are made up here, so a prefix cache would find what no client has sent.
        kv = KVBlocks(self.num_blocks, self.block_size, False, self.windows, max_step)
        return Scheduler(
            POLICIES[policy],
            kv,
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_model_len=LONGEST,
        )

    def fits(self, num_tokens: int) -> bool:
        """Whether a text of so many tokens has room under every policy, all of it being a prompt."""
        return all(
            self.scheduler(policy).kv.groups.most(num_tokens, at_once=num_tokens) <= self.num_blocks
            for policy in POLICIES
        )

    def capacity(self, cost: CostModel, workload: Workload) -> float:
        """Requests per second if every batch were full and nothing else were in the way: where loads are measured
        from."""
        prompt, output = sum(workload.prompt) / 2, sum(workload.output) / 2
        read = prompt * (cost.prompt_token + prompt / 2 * cost.prompt_pair)
        decode = cost.iteration / self.max_batch_size + cost.decode_row + (prompt + output / 2) * cost.kv_token
        return 1 / (read + output * decode)


def simulate(policy: str, rate: float, *, engine: Engine, workload: Workload, cost: CostModel) -> Result:
    """Serve the workload at `rate` requests per second. Raises CannotEverFit where the pool is too small for one of
    its requests."""

    def run(batch: Batch) -> tuple[float, list[list[int]]]:
        return cost.seconds(batch), [[TOKEN] if row.samples else [] for row in batch.rows]

    return Replay(engine.scheduler(policy), rate, workload.arrivals(rate), run).finish()
