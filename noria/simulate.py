"""`noria simulate`: latency against load for the scheduling policies, as a table, a plot and JSON.

Knows options and how to show figures; `simulation.py` makes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from noria.costs import BadCosts, CostModel
from noria.engine.scheduling.policy import POLICIES
from noria.options import BadSetting, check_lengths
from noria.replay import Workload
from noria.simulation import Engine, simulate
from noria.tables import console

LOADS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
"""Default loads, as shares of what a full batch could serve."""


def simulate_command(
    *,
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second; repeat it. (default: around the capacity)")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in each run.")] = 300,
    prompt: Annotated[tuple[int, int], typer.Option(help="Prompt tokens, uniform.")] = (32, 512),
    output: Annotated[tuple[int, int], typer.Option(help="Output tokens, uniform.")] = (1, 128),
    ask_max_tokens: Annotated[
        int, typer.Option(min=0, help="max_tokens that clients ask for; 0: exactly what they get, as in the paper.")
    ] = 512,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Requests in one iteration at most.")] = 16,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Token budget of one iteration.")] = 512,
    max_chunk_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prompt tokens beside running streams in one iteration, more if many rows idle; 0: the whole budget.",
        ),
    ] = 32,
    kv_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the KV memory.")] = 384,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in one block.")] = 16,
    window: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="Tokens that a group of layers sees, 0: all; repeat it for each group. (default: one of all)"
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="What iterations cost, from `noria trace --fit-costs`. (default: the demo model)"),
    ] = None,
    iteration_ms: Annotated[float | None, typer.Option(min=0, help="Cost of an iteration.")] = None,
    decode_row_ms: Annotated[float | None, typer.Option(min=0, help="Cost of a decoding row.")] = None,
    prompt_token_ms: Annotated[float | None, typer.Option(min=0, help="Cost of a prompt token.")] = None,
    kv_token_us: Annotated[
        float | None, typer.Option(min=0, help="Cost of a token of context that a decoding row reads, microseconds.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against throughput into this PNG.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> int:
    """Compare the scheduling policies on a simulated engine: latency against load."""
    cost = _cost(
        costs,
        iteration=(iteration_ms, 1e-3),
        decode_row=(decode_row_ms, 1e-3),
        prompt_token=(prompt_token_ms, 1e-3),
        kv_token=(kv_token_us, 1e-6),
    )
    workload = Workload(requests, prompt, output, ask_max_tokens, seed)
    windows = tuple(window or (0,))
    engine = Engine(max_batch_size, max_batch_tokens, max_chunk_tokens, kv_blocks, block_size, windows)
    _check(engine, workload, cost, rate)
    if plot is not None and find_spec("matplotlib") is None:
        raise BadSetting("--plot needs matplotlib: pip install matplotlib")
    rates = rate or [share * engine.capacity(cost, workload) for share in LOADS]
    summaries = [
        simulate(policy, load, engine=engine, workload=workload, cost=cost).summary()
        for load in rates
        for policy in POLICIES
    ]
    console().print(table_of(summaries))
    if json_file is not None:
        settings = {"cost": asdict(cost), "workload": asdict(workload), "engine": asdict(engine)}
        json_file.write_text(json.dumps({**settings, "results": summaries}, indent=2) + "\n")
    if plot is not None:
        draw(summaries, plot)
    return 0


def _cost(file: Path | None, **given: tuple[float | None, float]) -> CostModel:
    """The file's costs, or the demo model's, with those given in their stead: each a figure and its unit in seconds."""
    try:
        cost = CostModel() if file is None else CostModel.load(file)
    except BadCosts as error:
        raise BadSetting(f"--costs {error}") from None
    return replace(cost, **{name: value * unit for name, (value, unit) in given.items() if value is not None})


def _check(engine: Engine, workload: Workload, cost: CostModel, rates: Sequence[float] | None) -> None:
    check_lengths(prompt=workload.prompt, output=workload.output)
    for rate in rates or ():
        if not rate > 0:  # nan included
            raise BadSetting(f"--rate {rate:g}: must be more than 0")
    if not any(asdict(cost).values()):
        raise BadSetting("an iteration that costs nothing has no latency: give some cost")
    longest = workload.prompt[1] + max(workload.output[1], workload.max_tokens)
    if not engine.fits(longest):
        raise BadSetting(f"--kv-blocks {engine.num_blocks}: a request may have {longest} tokens and would never fit")


def table_of(summaries: Sequence[dict[str, Any]]) -> Table:
    """The figures for a terminal: one block of rows per load."""
    legend = "ms/tok: latency over output tokens; first s: until the first token; medians, each with its p99"
    table = Table(title="latency against load", caption=legend, box=box.SIMPLE)
    for heading in ("req/s", "policy", "ms/tok", "p99", "first s", "p99", "tok/s", "rows", "KV %", "evicted"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            f"{summary['rate']:.3f}",
            summary["policy"],
            f"{1e3 * summary['latency_per_token_median']:.0f}",
            f"{1e3 * summary['latency_per_token_p99']:.0f}",
            f"{summary['time_to_first_token_median']:.2f}",
            f"{summary['time_to_first_token_p99']:.2f}",
            f"{summary['tokens_per_second']:.1f}",
            f"{summary['mean_batch_size']:.1f}",
            f"{100 * summary['kv_mean']:.0f}",
            str(summary["num_preemptions"]),
            end_section=summary["policy"] == list(POLICIES)[-1],
        )
    return table


def draw(summaries: Sequence[dict[str, Any]], file: Path) -> None:
    """Median latency per token and p99 of the first token against throughput, as in Figure 10 of the paper."""
    from matplotlib.figure import Figure  # of the extra `bench`

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    measures = {"latency_per_token_median": "median latency per token [s]", "time_to_first_token_p99": "p99 TTFT [s]"}
    for axes, (measure, label) in zip(figure.subplots(1, 2), measures.items(), strict=True):
        for policy in POLICIES:
            points = [summary for summary in summaries if summary["policy"] == policy]
            axes.plot([p["tokens_per_second"] for p in points], [p[measure] for p in points], "o-", label=policy)
        axes.set(xlabel="throughput [tokens/s]", ylabel=label, yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150, format="png")
