"""`noria trace`: an iteration log as a table and as a picture of the carousel.

Knows options and how to show figures; `trace_file.py` reads, `trace_picture.py` draws.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from noria.costs import BadCosts, fit
from noria.options import BadSetting
from noria.trace_file import BadTrace, Trace, read, summarise
from noria.trace_picture import draw

FORMATS = (".png", ".svg")


def trace_command(
    *,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Iteration logs; the last run of each.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw the carousel into this PNG or SVG, a panel per FILE.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="First iteration, counted from 0.")] = 0,
    last: Annotated[int | None, typer.Option(min=0, help="Last iteration. (default: the end)")] = None,
    by_time: Annotated[bool, typer.Option("--by-time", help="Seconds on the x axis, not iterations.")] = False,
    title: Annotated[str, typer.Option(help="Above the picture.")] = "",
    fit_costs: Annotated[
        Path | None, typer.Option(help="Write what iterations cost here, for `noria simulate --costs`.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> int:
    """Show an engine's iteration log: who was in the batch, and what iterations took."""
    if output is not None and output.suffix.lower() not in FORMATS:
        raise BadSetting(f"--output {output}: must end in {' or '.join(FORMATS)}")
    if output is not None and find_spec("matplotlib") is None:
        raise BadSetting("--output needs matplotlib: pip install matplotlib")
    if fit_costs is not None and find_spec("numpy") is None:
        raise BadSetting("--fit-costs needs numpy: pip install numpy")
    traces = [_part(path, first, last) for path in files]
    Console().print(table_of(files, traces))
    if fit_costs is not None:
        _fit(traces, fit_costs)
    if json_file is not None:
        figures = {str(path): asdict(summarise(trace)) for path, trace in zip(files, traces, strict=True)}
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if output is not None:
        draw(traces, output, by_time=by_time, title=title)
    return 0


def _part(path: Path, first: int, last: int | None) -> Trace:
    try:
        whole = read(path)
    except BadTrace as error:
        raise BadSetting(str(error)) from None
    count = len(whole.iterations)
    trace = whole.between(first, count - 1 if last is None else last)
    if not trace.iterations:
        raise BadSetting(f"--first {first}: {path} has {count} iterations")
    return trace


def _fit(traces: Sequence[Trace], file: Path) -> None:
    try:
        found = fit(traces)
    except BadCosts as error:
        raise BadSetting(f"--fit-costs: {error}") from None
    about = {**asdict(found), "model": traces[0].start.model}
    del about["cost"]
    found.cost.save(file, **about)
    Console(highlight=False).print(
        f"costs of {found.num_iterations} iterations ({found.num_left_out} left out): median error "
        f"{100 * found.error:.0f} %, {100 * found.held_up:.0f} % of the time held up"
    )


def table_of(files: Sequence[Path], traces: Sequence[Trace]) -> Table:
    """A column per run."""
    table = Table(title="iterations")
    table.add_column("")
    for path, trace in zip(files, traces, strict=True):
        table.add_column(f"{path.name}\n{trace.start.model}\n{trace.start.policy}", justify="right")
    found = [summarise(trace) for trace in traces]
    for name, values in {
        "iterations": [str(s.num_iterations) for s in found],
        "seconds": [f"{s.seconds:.2f}" for s in found],
        "requests": [str(s.num_requests) for s in found],
        "prompt tokens computed": [str(s.prompt_tokens) for s in found],
        "output tokens": [str(s.output_tokens) for s in found],
        "output tokens/s": [f"{s.output_tokens / s.seconds:.1f}" for s in found],
        "rows at work, mean": [f"{s.mean_rows:.1f}" for s in found],
        "slots at work": [f"{100 * s.occupancy:.1f} %" for s in found],
        "rows that are padding": [f"{100 * s.padding:.1f} %" for s in found],
        "preemptions": [str(s.num_preemptions) for s in found],
        "KV blocks used, mean / peak": [f"{100 * s.kv_mean:.0f} % / {100 * s.kv_peak:.0f} %" for s in found],
        "forward, median / p99": [f"{1e3 * s.step_median:.1f} / {1e3 * s.step_p99:.1f} ms" for s in found],
        "select, median": [f"{1e6 * s.select_median:.0f} us" for s in found],
        "exchange, median": [f"{1e6 * s.exchange_median:.0f} us" for s in found],
    }.items():
        table.add_row(name, *values)
    return table
