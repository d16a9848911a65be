"""The carousel: one lane per batch slot, coloured by request, over iterations or seconds.

Knows matplotlib (of the extra `bench`) and one run's figures; no file of log lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noria.trace_file import Span, Summary, Trace, spans, summarise

# Muted, told apart by people who do not see red and green alike, and neighbours far from each other.
COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2",
    "#edc948", "#9c755f", "#6b6ecf", "#ff9da7", "#8cd17d", "#499894",
)  # fmt: skip
INK, FAINT, PAPER = "#26323c", "#9aa5ae", "#ffffff"
LANE = 0.78  # height of a bar where lanes are 1 apart
MARKS = 240  # iterations in a picture up to which each is marked off from the next
INCHES_PER_LANE = 0.27


def draw(traces: Sequence[Trace], file: Path, *, by_time: bool = False, title: str = "") -> None:
    """One panel per run, all on one scale. `file` ends in .png or .svg."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    found = [_Panel(trace, by_time) for trace in traces]
    lanes = [panel.num_lanes for panel in found]
    figure = Figure(
        figsize=(11, sum(lanes) * INCHES_PER_LANE + 1.25 * len(found) + (0.8 if title else 0.35)),
        layout=ConstrainedLayoutEngine(h_pad=0.02, hspace=0.0),
        facecolor=PAPER,
    )
    heights = [height for count in lanes for height in (count * INCHES_PER_LANE, 0.32)]
    axes = figure.subplots(2 * len(found), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for index, panel in enumerate(found):
        panel.draw_lanes(axes[2 * index])
        panel.draw_memory(axes[2 * index + 1])
    axes[-1].set_xlim(0, max(panel.edges[-1] for panel in found))
    axes[-1].set_xlabel("seconds" if by_time else "iteration", color=INK)
    axes[-1].tick_params(axis="x", labelbottom=True)
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=14, fontweight="bold")
    _legend(figure)
    with matplotlib.rc_context({"svg.hashsalt": "noria"}):  # the same run gives the same file
        metadata = {"Date": None} if file.suffix.lower() == ".svg" else None
        figure.savefig(file, dpi=160, metadata=metadata)


class _Panel:
    """One run: where its iterations begin and end on the x axis."""

    def __init__(self, trace: Trace, by_time: bool) -> None:
        self.trace = trace
        self.spans = spans(trace)
        used = 1 + max(span.lane for span in self.spans)
        # Empty slots are part of the picture, but not when a large batch is nearly all empty.
        self.num_lanes = max(used, min(trace.start.max_batch_size, 2 * used))
        count = len(trace.iterations)
        if by_time:
            first = trace.iterations[0]
            zero = first.at - 1e-6 * (first.forward_us + first.select_us)
            self.edges = [0.0, *(iteration.at - zero for iteration in trace.iterations)]
        else:
            self.edges = [float(index) for index in range(count + 1)]

    def draw_lanes(self, axes: Any) -> None:
        for span in self.spans:
            self._bar(axes, span)
        if len(self.trace.iterations) <= MARKS:
            axes.vlines(self.edges, -0.5, self.num_lanes - 0.5, color=PAPER, linewidth=0.35, zorder=3)
        self._ends(axes)
        self._names(axes)
        axes.set_ylim(self.num_lanes - 0.45, -0.55)
        axes.set_yticks([0, self.num_lanes - 1], ["slot 1", str(self.num_lanes)])
        summary, start = summarise(self.trace), self.trace.start
        axes.set_title(start.policy, loc="left", color=INK, fontsize=12, fontweight="bold", pad=4)
        axes.set_title(_headline(summary), loc="right", color=INK, fontsize=9, pad=5)
        axes.set_facecolor("#f3f5f6")
        _bare(axes)

    def draw_memory(self, axes: Any) -> None:
        used = [iteration.blocks_used / self.trace.start.num_blocks for iteration in self.trace.iterations]
        axes.stairs(used, self.edges, fill=True, color="#c9d3da", linewidth=0)
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0.5], ["KV memory"])
        _bare(axes)

    def _bar(self, axes: Any, span: Span) -> None:
        from matplotlib.patches import Rectangle

        left, right = self.edges[span.first], self.edges[span.last + 1]
        colour = COLOURS[span.request % len(COLOURS)]
        style: dict[str, Any] = {"facecolor": colour, "alpha": 0.5}
        if span.phase == "p":
            style = {"facecolor": colour}
        elif span.phase == "-":
            style = {"facecolor": PAPER, "edgecolor": FAINT, "hatch": "//////", "linewidth": 0.0}
        axes.add_patch(Rectangle((left, span.lane - LANE / 2), right - left, LANE, zorder=2, **style))

    def _ends(self, axes: Any) -> None:
        """A stroke where a request left, a cross where it was put back."""
        lane = {}
        for index, iteration in enumerate(self.trace.iterations):
            lane.update({row.request: row.lane for row in iteration.rows if row.phase != "-"})
            right = self.edges[index + 1]
            for number, _ in iteration.ended:
                if number in lane and self.trace.start.policy != "static":
                    at = lane[number]
                    axes.vlines(right, at - LANE / 2, at + LANE / 2, color=INK, linewidth=1.6, zorder=4)
            for number in iteration.preempted:
                if number in lane:
                    axes.plot(right, lane[number], "x", color=INK, markersize=6, markeredgewidth=1.6, zorder=5)

    def _names(self, axes: Any) -> None:
        """The request's number on the longest of its bars, where there is room."""
        longest: dict[tuple[int, int], Span] = {}
        for span in self.spans:
            key = (span.request, span.lane)
            if span.phase != "-" and (key not in longest or span.last - span.first > self._length(longest[key])):
                longest[key] = span
        for span in longest.values():
            left, right = self.edges[span.first], self.edges[span.last + 1]
            if right - left > 0.018 * self.edges[-1]:
                axes.text(
                    (left + right) / 2, span.lane, str(span.request + 1),
                    ha="center", va="center_baseline", fontsize=8, color=INK, zorder=6, clip_on=True,
                )  # fmt: skip

    @staticmethod
    def _length(span: Span) -> int:
        return span.last - span.first


def _headline(summary: Summary) -> str:
    parts = [
        f"{summary.num_requests} requests",
        f"{summary.num_iterations} iterations in {summary.seconds:.1f} s",
        f"{summary.output_tokens} tokens, {summary.output_tokens / summary.seconds:.1f} per second",
        f"{100 * summary.occupancy:.0f} % of slots at work",
    ]
    return "   ·   ".join(parts)


def _bare(axes: Any) -> None:
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.tick_params(axis="x", labelbottom=False)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = "#5b6b78"
    marks = [
        Patch(facecolor=grey, label="prompt read"),
        Patch(facecolor=grey, alpha=0.5, label="a token each iteration"),
        Patch(facecolor=PAPER, edgecolor=FAINT, hatch="//////", linewidth=0, label="done, held as padding"),
        Line2D([], [], color=INK, marker="|", linestyle="", markersize=9, markeredgewidth=1.6, label="leaves"),
        Line2D([], [], color=INK, marker="x", linestyle="", markersize=6, markeredgewidth=1.6, label="preempted"),
    ]
    figure.legend(handles=marks, loc="outside lower right", ncols=5, frameon=False, fontsize=8, labelcolor=INK)
