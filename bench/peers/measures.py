"""What every server is asked, and what is read from its answers.

Knows loads and figures; not which server it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

from bench.peers.running import Running, machine_seconds
from noria.load import Client, Outcome, Prompts, Target, calibrate, open_session, summary
from noria.replay import Workload

PATIENCE = 300.0  # seconds without a byte


@dataclass(frozen=True)
class Measure:
    """A closed loop of `concurrency` clients, and the figure of its outcomes that is compared."""

    name: str
    workload: Workload
    concurrency: int
    figure: Callable[[Mapping[str, Any]], float]
    unit: str
    more_is_better: bool = True


def _fixed(concurrency: int, requests: int) -> Measure:
    workload = Workload(requests, (32, 32), (48, 48))
    return Measure(f"{concurrency} at once", workload, concurrency, lambda f: f["tokens_per_second"], "tokens/s")


MEASURES = (
    _fixed(1, 4),
    _fixed(16, 32),
    _fixed(64, 64),
    Measure(
        "prompt of 512",
        Workload(3, (512, 512), (1, 1)),
        1,
        lambda figures: figures["latency_median"],
        "s",
        more_is_better=False,
    ),
    Measure("Orca's lengths, 16 at once", Workload(32), 16, lambda f: f["requests_per_second"], "requests/s"),
)


def _nothing(outcome: Outcome) -> None:
    pass


async def words(target: Target) -> Prompts:
    """What the server counts of a prompt. Its first answers warm it up. Raises LoadError."""
    async with open_session(PATIENCE) as session:
        return await calibrate(session, target, "")


async def run(measure: Measure, target: Target, prompts: Prompts, server: Running) -> dict[str, Any]:
    """One round of one measure of one server; the others rest. JSON."""
    arrivals = measure.workload.arrivals(1.0)
    began, machine, cpu, own = perf_counter(), machine_seconds(), server.cpu_seconds(), process_time()
    async with open_session(PATIENCE) as session:
        outcomes = await Client(session, target, prompts).closed_loop(arrivals, measure.concurrency, _nothing)
    cpu = server.cpu_seconds() - cpu
    seconds = perf_counter() - began
    figures = summary(outcomes)
    if figures["failed"]:
        return {"failed": figures["failed"], "errors": figures["errors"]}
    asked = sum(arrival.output for arrival in arrivals)
    return {
        "value": measure.figure(figures),
        "cpu_ms_per_token": 1e3 * cpu / figures["output_tokens"],
        "tokens_of_asked": figures["output_tokens"] / asked,
        "prompt_tokens": figures["prompt_tokens"] / len(arrivals),
        "others_cores": max(0.0, machine_seconds() - machine - cpu - (process_time() - own)) / seconds,
        "seconds": seconds,
    }
