"""The real scheduler on a virtual clock: what each policy makes of a workload when an iteration costs so and so.

Knows no model, no transport and no terminal; what an iteration costs is the cost model's word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Any

from noria.engine.scheduling.batch import Batch
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler

_TOKEN, _END = 1, 2


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one iteration, a sum over its rows. The defaults are the demo model's on two CPU cores."""

    iteration: float = 0.047  # weights read once, whatever the batch
    decode_row: float = 0.008
    prompt_token: float = 0.0025
    kv_token: float = 5e-6  # per token of context that a row attends to

    def seconds(self, batch: Batch) -> float:
        total = self.iteration
        for row in batch.rows:
            total += self.decode_row if row.is_decode else row.num_tokens * self.prompt_token
            total += (row.start + row.num_tokens) * self.kv_token
        return total


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come: `output` tokens long, though its client asks for up to `max_tokens`."""

    name: str
    seconds: float
    prompt: int
    output: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Uniform lengths and Poisson arrivals; the defaults are the trace of section 6.2 of Orca (OSDI 2022)."""

    num_requests: int = 300
    prompt: tuple[int, int] = (32, 512)
    output: tuple[int, int] = (1, 128)
    max_tokens: int = 0  # asked for by every client; 0: exactly what it gets
    seed: int = 0

    def arrivals(self, rate: float) -> list[Arrival]:
        """Requests at `rate` per second. Lengths depend on the seed alone: all loads serve the same requests."""
        lengths, gaps = Random(self.seed), Random(self.seed + 1)
        clock, coming = 0.0, []
        for index in range(self.num_requests):
            clock += gaps.expovariate(rate)
            prompt, output = lengths.randint(*self.prompt), lengths.randint(*self.output)
            coming.append(Arrival(f"r{index}", clock, prompt, output, max(output, self.max_tokens)))
        return coming


@dataclass(frozen=True, slots=True)
class Engine:
    """The scheduler's settings."""

    max_batch_size: int = 16
    max_batch_tokens: int = 512
    num_blocks: int = 1024
    block_size: int = 16

    def scheduler(self, policy: str) -> Scheduler:
        # Prompts are made up of one token here, so a prefix cache would find what no client has sent.
        kv = KVBlocks(self.num_blocks, self.block_size, prefix_cache=False)
        return Scheduler(
            POLICIES[policy],
            kv,
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.num_blocks * self.block_size,
        )

    def capacity(self, cost: CostModel, workload: Workload) -> float:
        """Requests per second if every batch were full and nothing else were in the way: where loads are measured
        from."""
        prompt, output = sum(workload.prompt) / 2, sum(workload.output) / 2
        decode = cost.iteration / self.max_batch_size + cost.decode_row + (prompt + output / 2) * cost.kv_token
        return 1 / (prompt * cost.prompt_token + output * decode)


@dataclass(slots=True)
class Served:
    """One request's times, in seconds on the virtual clock."""

    arrival: Arrival
    first_token: float = 0.0
    end: float = 0.0
    num_output: int = 0

    @property
    def seconds_per_token(self) -> float:
        """End-to-end latency over generated tokens: the paper's measure."""
        return (self.end - self.arrival.seconds) / self.num_output

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.arrival.seconds


@dataclass(slots=True)
class Result:
    """One policy under one load."""

    policy: str
    rate: float  # requests per second that arrive
    served: list[Served] = field(default_factory=list)
    seconds: float = 0.0  # until the last one ended
    num_iterations: int = 0
    num_rows: int = 0
    num_preemptions: int = 0

    def summary(self) -> dict[str, Any]:
        """The figures of the table, by name."""
        per_token = [request.seconds_per_token for request in self.served]
        first = [request.time_to_first_token for request in self.served]
        return {
            "policy": self.policy,
            "rate": self.rate,
            "latency_per_token_median": percentile(per_token, 0.5),
            "latency_per_token_p99": percentile(per_token, 0.99),
            "time_to_first_token_median": percentile(first, 0.5),
            "time_to_first_token_p99": percentile(first, 0.99),
            "tokens_per_second": sum(request.num_output for request in self.served) / self.seconds,
            "requests_per_second": len(self.served) / self.seconds,
            "mean_batch_size": self.num_rows / self.num_iterations,
            "num_preemptions": self.num_preemptions,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)]


def simulate(policy: str, rate: float, *, engine: Engine, workload: Workload, cost: CostModel) -> Result:
    """Serve the workload at `rate` requests per second. Raises CannotEverFit where the pool is too small for one of
    its requests."""
    scheduler = engine.scheduler(policy)
    result = Result(policy, rate)
    coming = deque(Served(arrival) for arrival in workload.arrivals(rate))
    queue: deque[Served] = deque()
    alive: dict[str, Served] = {}
    clock = 0.0
    while coming or queue or alive:
        while coming and coming[0].arrival.seconds <= clock:
            queue.append(coming.popleft())
        _claim(scheduler, queue, alive)
        batch = scheduler.select()
        if batch is None:
            clock = coming[0].arrival.seconds
            continue
        clock += cost.seconds(batch)
        result.num_iterations += 1
        result.num_rows += len(batch.rows)
        for progress in scheduler.complete(batch, [_sample(row.request, row.samples, alive) for row in batch.rows]):
            served = alive[progress.request.id]
            if progress.new_tokens and not served.num_output:
                served.first_token = clock
            served.num_output += len(progress.new_tokens)
            if progress.finish is not None:
                served.end = clock
                result.served.append(alive.pop(progress.request.id))
    scheduler.check()
    result.seconds = clock
    result.num_preemptions = scheduler.preemptions.total
    return result


def _claim(scheduler: Scheduler, queue: deque[Served], alive: dict[str, Served]) -> None:
    """Take from the queue what the engine has room for, in order, as an engine claims from the broker."""
    room = scheduler.room()
    requests, blocks = room.requests, room.blocks
    while queue and requests > 0:
        arrival = queue[0].arrival
        output = arrival.max_tokens if scheduler.policy.reserve_output else 1
        cost = scheduler.kv.blocks_for(arrival.prompt + output)
        if cost > blocks:
            return
        tokens = [_TOKEN] * arrival.prompt
        scheduler.add(Request(arrival.name, tokens, arrival.prompt, arrival.max_tokens, stop_ids=frozenset({_END})))
        alive[arrival.name] = queue.popleft()
        requests, blocks = requests - 1, blocks - cost


def _sample(request: Request, samples: bool, alive: dict[str, Served]) -> list[int]:
    if not samples:
        return []
    return [_END if request.num_output + 1 == alive[request.id].arrival.output else _TOKEN]
