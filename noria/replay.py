"""A workload of arrivals, served by the real scheduler an iteration at a time, and what its clients then saw.

Knows no model and no terminal. What an iteration takes is told by whoever runs it: a cost model (`simulation.py`), or
an engine whose time is measured (`bench/orca_curves.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Any

from noria.engine.scheduling.batch import Batch
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler

TOKEN, END = 1, 2

Run = Callable[[Batch], tuple[float, Sequence[Sequence[int]]]]
"""Computes an iteration: its seconds, and the tokens sampled by each row."""


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


@dataclass(slots=True)
class Served:
    """One request's times, in seconds on the clock of its run."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    end: float = 0.0

    @property
    def num_output(self) -> int:
        return len(self.token_times)

    @property
    def seconds_per_token(self) -> float:
        """End-to-end latency over generated tokens: the paper's measure."""
        return (self.end - self.arrival.seconds) / self.num_output

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.arrival.seconds

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(slots=True)
class Result:
    """One policy under one load. What is added up over iterations is weighted with their seconds."""

    policy: str
    rate: float  # requests per second that arrive
    served: list[Served] = field(default_factory=list)
    seconds: float = 0.0  # until the last one ended
    num_iterations: int = 0
    num_rows: int = 0
    num_tokens: int = 0  # sampled
    num_preemptions: int = 0
    busy_seconds: float = 0.0
    running_seconds: float = 0.0  # admitted requests, padding left out
    held_seconds: float = 0.0  # share of the KV blocks
    held_peak: float = 0.0
    loaded: tuple[float, int] = (0.0, 0)  # seconds and tokens until nobody was left to come or to wait, and half done

    def summary(self) -> dict[str, Any]:
        """The figures by name, times in seconds. Throughput is that while there was more to come: how the last
        requests drain says nothing of a load."""
        per_token = [request.seconds_per_token for request in self.served]
        first = [request.time_to_first_token for request in self.served]
        gaps = [gap for request in self.served for gap in request.gaps] or [0.0]
        seconds, tokens = self.loaded
        return {
            "policy": self.policy,
            "rate": self.rate,
            "latency_per_token_median": percentile(per_token, 0.5),
            "latency_per_token_p99": percentile(per_token, 0.99),
            "time_to_first_token_median": percentile(first, 0.5),
            "time_to_first_token_p99": percentile(first, 0.99),
            "inter_token_median": percentile(gaps, 0.5),
            "inter_token_p99": percentile(gaps, 0.99),
            "tokens_per_second": tokens / seconds,
            "requests_per_second": len(self.served) / self.seconds,
            "mean_batch_size": self.num_rows / self.num_iterations,
            "mean_running": self.running_seconds / self.busy_seconds,
            "kv_mean": self.held_seconds / self.busy_seconds,
            "kv_peak": self.held_peak,
            "num_preemptions": self.num_preemptions,
            "num_iterations": self.num_iterations,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)]


class Replay:
    """Serves arrivals on a clock that `run` moves: time passes while an iteration is computed, and is skipped while
    nobody is here."""

    def __init__(
        self,
        scheduler: Scheduler,
        rate: float,
        arrivals: Sequence[Arrival],
        run: Run,
        *,
        prompt: Callable[[Arrival], list[int]] = lambda arrival: [TOKEN] * arrival.prompt,
        end: int = END,
    ) -> None:
        """`prompt` makes up a request's tokens; `end` is the token that ends it, and that `run` never samples."""
        self.clock = 0.0
        self.result = Result(scheduler.policy.name, rate)
        self._scheduler = scheduler
        self._run = run
        self._prompt = prompt
        self._end = end
        self._num_arrivals = len(arrivals)
        self._coming = deque(Served(arrival) for arrival in arrivals)
        self._queue: deque[Served] = deque()
        self._alive: dict[str, Served] = {}

    def step(self) -> bool:
        """One iteration, or the wait for the next arrival; False when everybody was served."""
        if not (self._coming or self._queue or self._alive):
            return False
        while self._coming and self._coming[0].arrival.seconds <= self.clock:
            self._queue.append(self._coming.popleft())
        self._claim()
        self._note_load()
        batch = self._scheduler.select()
        if batch is None:
            self.clock = self._coming[0].arrival.seconds
            return True
        running = sum(request.finish is None for request in self._scheduler.running)
        held = self._scheduler.kv.num_held / self._scheduler.kv.num_blocks
        seconds, sampled = self._run(batch)
        self.clock += seconds
        self._note_iteration(batch, seconds, running, held)
        ended = [self._ending(row.request, tokens) for row, tokens in zip(batch.rows, sampled, strict=True)]
        for progress in self._scheduler.complete(batch, ended):
            served = self._alive[progress.request.id]
            served.token_times += [self.clock] * len(progress.new_tokens)
            self.result.num_tokens += len(progress.new_tokens)
            if progress.finish is not None:
                served.end = self.clock
                self.result.served.append(self._alive.pop(progress.request.id))
        return True

    def finish(self) -> Result:
        """Serve what is left. Raises AssertionError where the scheduler's books are then wrong."""
        while self.step():
            pass
        self._scheduler.check()
        self.result.seconds = self.clock
        self.result.num_preemptions = self._scheduler.preemptions.total
        return self.result

    def _claim(self) -> None:
        """Take from the queue what the engine has room for, in order, as an engine claims from the broker."""
        scheduler = self._scheduler
        room = scheduler.room()
        requests, blocks = room.requests, room.blocks
        while self._queue and requests > 0:
            arrival = self._queue[0].arrival
            output = arrival.max_tokens if scheduler.policy.reserve_output else 1
            at_once = arrival.prompt if scheduler.policy.whole_prompts else 0
            cost = scheduler.kv.groups.most(arrival.prompt + output, at_once=at_once)
            if cost > blocks:
                return
            request = Request(
                arrival.name, self._prompt(arrival), arrival.prompt, arrival.max_tokens, stop_ids=frozenset({self._end})
            )
            scheduler.add(request)
            self._alive[arrival.name] = self._queue.popleft()
            requests, blocks = requests - 1, blocks - cost

    def _ending(self, request: Request, sampled: Sequence[int]) -> list[int]:
        """The sampled tokens, with the end of the request where its arrival says that it ends."""
        left = self._alive[request.id].arrival.output - request.num_output
        return [*sampled[: left - 1], self._end] if len(sampled) >= left > 0 else list(sampled)

    def _note_load(self) -> None:
        if self._coming or self._queue or 2 * len(self.result.served) < self._num_arrivals:
            self.result.loaded = (self.clock, self.result.num_tokens)

    def _note_iteration(self, batch: Batch, seconds: float, running: int, held: float) -> None:
        result = self.result
        result.num_iterations += 1
        result.num_rows += len(batch.rows)
        result.busy_seconds += seconds
        result.running_seconds += running * seconds
        result.held_seconds += held * seconds
        result.held_peak = max(result.held_peak, held)
