"""Draws what `bench/orca_curves.py` measured. Knows its JSON and matplotlib; no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"static": "#b07a3c", "orca": "#4e79a7", "paged": "#2f8f6b"}
INK, GRID = "#26323c", "#e3e8eb"
SIZE = 16
MARKERS = {4: "v", 16: "o", 32: "^"}


def draw(found: dict[str, Any], file: Path) -> None:
    """Six panels: latency (figures 10 and 11 of the paper), first token, inter-token, KV memory, large max_tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.6), layout="constrained")
    trace, alike, first, gaps, memory, ask = figure.subplots(2, 3).flat
    _latency(trace, found, "trace", "lengths as in Orca's trace, scaled (its figure 10)")
    _latency(alike, found, "alike", "all requests of one length (its figure 11)")
    _spread(first, found, "time_to_first_token", 1.0, "time to first token [s]")
    _spread(gaps, found, "inter_token", 1e3, "between two tokens [ms]")
    _memory(memory, found)
    _ask(ask, found)
    figure.savefig(file, dpi=140)


def _points(found: dict[str, Any], experiment: str, size: int, policy: str, kind: str = "results") -> list[Any]:
    entries = [
        (entry["rate"], entry[kind][policy])
        for entry in found["points"].values()
        if (entry["point"]["experiment"], entry["point"]["max_batch_size"]) == (experiment, size)
        and policy in entry.get(kind, {})
    ]
    return [summary for _, summary in sorted(entries, key=lambda entry: entry[0])]


def _line(axes: Any, points: list[Any], measure: str, unit: float, **style: Any) -> None:
    axes.plot([p["tokens_per_second"] for p in points], [unit * p[measure] for p in points], **style)


def _latency(axes: Any, found: dict[str, Any], experiment: str, title: str) -> None:
    for size, marker in MARKERS.items():
        for policy, colour in COLOURS.items():
            points = _points(found, experiment, size, policy)
            if not points:
                continue
            main = size == SIZE
            style = {"color": colour, "alpha": 1.0 if main else 0.45, "linewidth": 1.8 if main else 1.0}
            label = f"{policy}, {size} slots"
            _line(axes, points, "latency_per_token_median", 1e3, marker=marker, markersize=4, label=label, **style)
            if main:
                guess = _points(found, experiment, size, policy, "simulated")
                _line(axes, guess, "latency_per_token_median", 1e3, color=colour, linestyle=":", linewidth=1.4)
    axes.plot([], [], color=INK, linestyle=":", label="simulated")
    _finish(axes, title, "median latency per token [ms]", log=True)


def _spread(axes: Any, found: dict[str, Any], measure: str, unit: float, label: str) -> None:
    for policy, colour in COLOURS.items():
        points = _points(found, "trace", SIZE, policy)
        _line(axes, points, f"{measure}_median", unit, color=colour, marker="o", markersize=4, label=f"{policy}, p50")
        _line(
            axes, points, f"{measure}_p99", unit, color=colour, marker="o", markersize=3, linestyle="--", alpha=0.6,
            label=f"{policy}, p99",
        )  # fmt: skip
    _finish(axes, label.split(" [")[0], label, log=True)


def _memory(axes: Any, found: dict[str, Any]) -> None:
    for policy, colour in COLOURS.items():
        _line(
            axes,
            _points(found, "trace", SIZE, policy),
            "kv_mean",
            100,
            color=colour,
            marker="o",
            markersize=4,
            label=policy,
        )
    _finish(axes, "KV memory taken", "mean share of the blocks [%]", log=False)


def _ask(axes: Any, found: dict[str, Any]) -> None:
    """Requests at once in one and the same memory, where clients ask for 512 tokens and use 32."""
    points = {policy: _points(found, "ask", SIZE, policy) for policy in COLOURS}
    bars = [(policy, found_points[0]) for policy, found_points in points.items() if found_points]
    for place, (policy, summary) in enumerate(bars):
        axes.bar(place, summary["mean_running"], width=0.6, color=COLOURS[policy])
        text = f"{summary['mean_running']:.1f} at once\n{summary['tokens_per_second']:.0f} tokens/s"
        axes.text(place, summary["mean_running"], text, ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_xticks(range(len(bars)), [policy for policy, _ in bars])
    axes.set_ylim(0, 1.3 * max((summary["mean_running"] for _, summary in bars), default=1))
    axes.set_title("max_tokens 512 asked for, 32 used on average", loc="left", fontsize=10, color=INK)
    axes.set_ylabel("requests at once, same KV memory", color=INK)
    _plain(axes)


def _finish(axes: Any, title: str, label: str, *, log: bool) -> None:
    if log:
        _log_scale(axes)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("throughput [tokens/s]", color=INK)
    axes.set_ylabel(label, color=INK)
    axes.set_xlim(left=0)
    axes.legend(fontsize=7, frameon=False)
    axes.grid(color=GRID)
    _plain(axes)


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _plain(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
