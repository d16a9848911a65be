"""Orca's experiment (OSDI 2022, figures 10 and 11) on one engine: `static`, `orca` and `paged` under Poisson arrivals.

    python -m bench.orca_curves --state curves.json --seconds 200     # repeat until it says that nothing is left
    python -m bench.orca_curves --state curves.json --report docs/images/orca_curves.png --costs costs.json

Plain torch computes unless `--kernels` says otherwise: its iteration costs 16 rows about twice what it costs one, which
is nearer to a GPU (where it costs about the same) than the C kernels' five times are.

Lengths are the paper's, scaled: outputs U(1,128) by 2, prompts U(32,512) by 16, that is by 2 and by another 8, because
two CPU cores compute about 25 prompt tokens in the time in which they read the weights once, and the paper's GPUs about
200: so that reading a prompt keeps its proportion to an iteration. Rates are shares of what `orca` serves when all
requests are there from the start.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from bench.orca_picture import draw
from bench.real_engine import RealEngine, run_together
from noria.costs import CostModel, fit, rows_of
from noria.engine.config import DEMO_MODEL, Kernels
from noria.replay import Workload
from noria.simulation import Engine, simulate
from noria.trace_file import Trace, read

ALL = ("static", "orca", "paged")
TRACE = Workload(prompt=(2, 32), output=(1, 64))
FULL = 1e6  # a rate at which all are there from the start


@dataclass(frozen=True)
class Point:
    """One load, under several policies at once. `share` of the capacity; 0: all requests at once."""

    experiment: str
    max_batch_size: int
    share: float
    num_requests: int
    policies: tuple[str, ...] = ALL

    @property
    def key(self) -> str:
        return f"{self.experiment}/{self.max_batch_size}/{self.share:g}"

    @property
    def workload(self) -> Workload:
        base = replace(TRACE, num_requests=self.num_requests)
        if self.experiment == "alike":
            return replace(base, prompt=(17, 17), output=(32, 32))
        if self.experiment == "ask":
            return replace(base, max_tokens=512)
        return base

    @property
    def engine(self) -> Engine:
        """KV memory for a full batch of the longest, so that only slots are scarce; where clients ask for more than
        they use, for four of what they ask."""
        blocks = 4 * -(-(32 + 512) // 16) if self.experiment == "ask" else self.max_batch_size * -(-(32 + 64) // 16)
        return Engine(self.max_batch_size, num_blocks=blocks)


POINTS = (
    Point("trace", 16, 0, 64),
    *(Point("trace", 16, share, count) for share, count in
      ((0.04, 16), (0.1, 24), (0.2, 32), (0.35, 36), (0.5, 40), (0.65, 48), (0.8, 56), (1.0, 64))),
    Point("ask", 16, 0, 40),
    Point("alike", 16, 0, 48),
    *(Point("alike", 16, share, count) for share, count in ((0.1, 12), (0.35, 24), (0.65, 36))),
    *(Point("trace", size, share, count, ("static", "orca")) for size in (4, 32) for share, count in
      ((0, 2 * size + 16), (0.25, 20), (0.7, 32))),
)  # fmt: skip
QUICK = (Point("trace", 4, 0, 8), Point("trace", 4, 0.5, 8), Point("ask", 8, 0, 8))


def measure(engine: RealEngine, point: Point, rate: float, logs: Path) -> dict[str, Any]:
    """Summaries by policy; an iteration log for each goes into `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    files = _log_files(point.key, point.policies, logs)
    for file in files:
        file.unlink(missing_ok=True)
    replays = [
        engine.replay(policy, rate, point.engine, point.workload.arrivals(rate), file)
        for policy, file in zip(point.policies, files, strict=True)
    ]
    return {result.policy: result.summary() for result in run_together(replays)}


def _log_files(key: str, policies: Iterable[str], logs: Path) -> list[Path]:
    return [logs / f"{key.replace('/', '-')}-{policy}.jsonl" for policy in policies]


def run(
    points: Sequence[Point], state: Path, logs: Path, model: str, seconds: float, kernels: Kernels = "auto"
) -> bool:
    """Measure what is not in `state` yet, for about so many seconds; True when nothing is left."""
    found: dict[str, Any] = (
        json.loads(state.read_text()) if state.exists() else {"model": model, "kernels": kernels, "points": {}}
    )
    engine: RealEngine | None = None
    until = time.monotonic() + seconds
    for point in points:
        if point.key in found["points"]:
            continue
        if time.monotonic() > until:
            return False
        engine = engine or RealEngine(model, kernels=kernels)
        began = time.monotonic()
        rate = point.share * _capacity(found, point) or FULL
        results = measure(engine, point, rate, logs)
        found["points"][point.key] = {"point": asdict(point), "rate": rate, "results": results}
        state.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{point.key}: {time.monotonic() - began:.0f} s", flush=True)
    return True


def _capacity(found: dict[str, Any], point: Point) -> float:
    """Requests per second that `orca` served when all were there."""
    if not point.share:
        return 0.0
    full = found["points"][replace(point, share=0).key]["results"]["orca"]
    return float(full["tokens_per_second"]) / (sum(point.workload.output) / 2)


def simulated(found: dict[str, Any], cost: CostModel) -> None:
    """Add to every point what the simulated engine makes of it, at the speed that the machine had in each run."""
    for entry in found["points"].values():
        point = Point(**{**entry["point"], "policies": tuple(entry["point"]["policies"])})
        entry["simulated"] = {
            policy: simulate(
                policy,
                entry["rate"],
                engine=point.engine,
                workload=point.workload,
                cost=CostModel(*(price * entry["slowness"][policy] for price in asdict(cost).values())),
            ).summary()
            for policy in point.policies
        }


def slowness(trace: Trace, cost: CostModel) -> float:
    """Measured over predicted seconds of a run's iterations: others use this machine as well, and it takes minutes."""
    measured = sum(1e-6 * (iteration.forward_us + iteration.select_us) for iteration in trace.iterations)
    return measured / sum(cost.of(rows_of(iteration)) for iteration in trace.iterations)


MEASURES = ("tokens_per_second", "latency_per_token_median")


def differences(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Simulated over real, less one: by point and policy, then by measure."""
    return {
        f"{key}/{policy}": {m: entry["simulated"][policy][m] / real[m] - 1 for m in MEASURES}
        for key, entry in found["points"].items()
        for policy, real in entry["results"].items()
    }


def table_of(found: dict[str, Any]) -> Table:
    table = Table(title="measured (and simulated)", box=None, pad_edge=False)
    for heading in ("point", "policy", "tok/s", "ms/tok p50", "TTFT p50 / p99 s", "ITL p50 / p99 ms", "rows", "KV"):
        table.add_column(heading, justify="left" if heading in ("point", "policy") else "right", no_wrap=True)
    for key, entry in found["points"].items():
        for policy, real in entry["results"].items():
            guess = entry.get("simulated", {}).get(policy)
            table.add_row(
                key,
                policy,
                f"{real['tokens_per_second']:.1f}" + (f" ({guess['tokens_per_second']:.1f})" if guess else ""),
                f"{1e3 * real['latency_per_token_median']:.0f}"
                + (f" ({1e3 * guess['latency_per_token_median']:.0f})" if guess else ""),
                f"{real['time_to_first_token_median']:.2f} / {real['time_to_first_token_p99']:.2f}",
                f"{1e3 * real['inter_token_median']:.0f} / {1e3 * real['inter_token_p99']:.0f}",
                f"{real['mean_running']:.1f}",
                f"{100 * real['kv_mean']:.0f} %",
            )
    return table


def curve(found: dict[str, Any], policy: str, experiment: str = "trace", size: int = 16) -> list[tuple[float, float]]:
    """(tokens/s, median seconds per token) by rising load."""
    entries = [
        (entry["rate"], entry["results"][policy])
        for entry in found["points"].values()
        if (entry["point"]["experiment"], entry["point"]["max_batch_size"]) == (experiment, size)
        and policy in entry["results"]
    ]
    return [(r["tokens_per_second"], r["latency_per_token_median"]) for _, r in sorted(entries, key=lambda e: e[0])]


def throughput_at(points: Sequence[tuple[float, float]], latency: float) -> float:
    """Tokens/s at which the curve first reaches `latency`, on straight lines between the points."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 <= latency < y1:
            return x0 + (x1 - x0) * (latency - y0) / (y1 - y0)
    return max(x for x, _ in points) if points[0][1] <= latency else points[0][0] * latency / points[0][1]


def verdict(found: dict[str, Any]) -> dict[str, float]:
    """What the curves come down to, at the largest set of points there is."""
    curves = {policy: curve(found, policy) for policy in ALL}
    unloaded = min(points[0][1] for points in curves.values())
    peak = {policy: max(x for x, _ in points) for policy, points in curves.items()}
    at = {policy: throughput_at(points, 2 * unloaded) for policy, points in curves.items()}
    ask = found["points"]["ask/16/0"]["results"]
    loads = [
        e["results"]
        for e in found["points"].values()
        if e["point"]["experiment"] == "trace" and "paged" in e["results"]
    ]
    return {
        "peak_orca_over_static": peak["orca"] / peak["static"],
        "at_twice_unloaded_orca_over_static": at["orca"] / at["static"],
        "paged_over_orca_throughput_least": min(r["paged"][MEASURES[0]] / r["orca"][MEASURES[0]] for r in loads),
        "paged_over_orca_latency_most": max(r["paged"][MEASURES[1]] / r["orca"][MEASURES[1]] for r in loads),
        "ask_running_paged_over_orca": ask["paged"]["mean_running"] / ask["orca"]["mean_running"],
        "ask_throughput_paged_over_orca": ask["paged"][MEASURES[0]] / ask["orca"][MEASURES[0]],
    }


def report(state: Path, logs: Path, picture: Path | None, costs: Path | None) -> dict[str, Any]:
    """Fit costs to the logs, simulate, print, draw. Returns what was printed and drawn."""
    found: dict[str, Any] = json.loads(state.read_text())
    traces = {
        key: [read(file) for file in _log_files(key, entry["results"], logs)] for key, entry in found["points"].items()
    }
    fitted = fit([trace for each in traces.values() for trace in each])
    found["cost"] = asdict(fitted.cost)
    if costs is not None:
        fitted.cost.save(costs, model=found["model"], iterations=fitted.num_iterations, error=fitted.error)
    for key, entry in found["points"].items():
        entry["slowness"] = {
            policy: slowness(trace, fitted.cost) for policy, trace in zip(entry["results"], traces[key], strict=True)
        }
    simulated(found, fitted.cost)
    off = differences(found)
    console = Console(width=130)
    console.print(table_of(found))
    console.print({name: f"{value:.3g}" for name, value in asdict(fitted).items() if name != "cost"}, found["cost"])
    for measure_name in MEASURES:
        worst = max(off, key=lambda key: abs(off[key][measure_name]))
        console.print(f"simulated against real, {measure_name}: at most {off[worst][measure_name]:+.0%} ({worst})")
    if "ask/16/0" in found["points"] and len(found["points"]) > 3:
        found["verdict"] = verdict(found)
        console.print({name: round(value, 2) for name, value in found["verdict"].items()})
    if picture is not None:
        draw(found, picture)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, help="figures so far, as JSON; default: a file that is thrown away")
    parser.add_argument("--logs", type=Path, help="folder of the iteration logs; default: beside the state")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--kernels", choices=get_args(Kernels), default="torch", help="default: torch")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further point after so many")
    parser.add_argument("--report", type=Path, help="measure nothing; draw what there is into this PNG")
    parser.add_argument("--costs", type=Path, help="with --report: write the fitted costs here")
    parser.add_argument("--json", type=Path, help="with --report: write all figures here")
    parser.add_argument("--quick", action="store_true", help="three small points, then a report")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        state = options.state or Path(folder) / "curves.json"
        logs = options.logs or state.with_suffix(".logs")
        done = options.report is not None or run(
            QUICK if options.quick else POINTS, state, logs, options.model, options.seconds, options.kernels
        )
        if options.report is not None or options.quick:
            found = report(state, logs, options.report, options.costs)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
        print("nothing is left to measure" if done else "there is more to measure: run it again")


if __name__ == "__main__":
    main()
