"""What was measured, as a table: each peer's median, and how far Noria is ahead of it.

Knows the runs as they are kept; not how they came to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from bench.peers.measures import MEASURES, Measure
from noria.tables import columns

OURS = "noria"
Runs = Sequence[Mapping[str, Any]]


def of(runs: Runs, peer: str, measure: Measure, figure: str = "value") -> float | None:
    """The median over the rounds, or None where none went well."""
    found = [run[figure] for run in runs if (run["peer"], run["measure"]) == (peer, measure.name) and figure in run]
    return median(found) if found else None


def ahead(measure: Measure, ours: float, theirs: float) -> float:
    """Above 1 where ours is better."""
    return ours / theirs if measure.more_is_better else theirs / ours


def tables(state: Mapping[str, Any]) -> list[Table]:
    """One with the figures, one with CPU time, and one with the servers themselves."""
    runs, peers = state["runs"], list(state["peers"])
    return [
        _figures(runs, peers, "value", "", [measure.unit for measure in MEASURES]),
        _figures(runs, peers, "cpu_ms_per_token", "CPU: ", ["ms per output token"] * len(MEASURES)),
        _servers(state),
    ]


def _figures(runs: Runs, peers: Sequence[str], figure: str, title: str, units: Sequence[str]) -> Table:
    headings = ["", "rounds", *peers]
    table = columns(*headings, numbers=headings[1:])
    for measure, unit in zip(MEASURES, units, strict=True):
        ours = of(runs, OURS, measure, figure)
        cells = []
        for peer in peers:
            theirs = of(runs, peer, measure, figure)
            if theirs is None:
                cells.append("failed" if any(_is(run, peer, measure) for run in runs) else "-")
            elif peer == OURS or ours is None:
                cells.append(_short(theirs))
            else:
                ratio = ahead(measure, ours, theirs) if figure == "value" else theirs / ours
                cells.append(f"{_short(theirs)} ({ratio:.2f}x)")
        rounds = {sum(_is(run, peer, measure) for run in runs) for peer in peers} - {0}
        table.add_row(f"{title}{measure.name}, {unit}", str(min(rounds, default=0)), *cells)
    return table


def _short(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _is(run: Mapping[str, Any], peer: str, measure: Measure) -> bool:
    return (run["peer"], run["measure"]) == (peer, measure.name)


def _servers(state: Mapping[str, Any]) -> Table:
    table = columns("peer", "what", "ready in s", "MiB, all processes", "others' cores", numbers=("ready in s",))
    for peer, known in state["peers"].items():
        others = [run["others_cores"] for run in state["runs"] if run["peer"] == peer and "others_cores" in run]
        cells = [f"{median(known[name]):.{digits}f}" if known.get(name) else "-" for name, digits in FIGURES]
        table.add_row(peer, known["what"], *cells, f"{median(others):.2f}" if others else "-")
    for peer, why in state["absent"].items():
        table.add_row(peer, f"absent: {why}", "-", "-", "-")
    return table


FIGURES = (("start_seconds", 1), ("memory_mib", 0))
