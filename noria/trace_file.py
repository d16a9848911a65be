"""Reads an iteration log back: one run of one engine, and what it adds up to.

Knows the file's lines; not how they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from noria.engine.trace import TraceIteration, TraceLine, TraceRequest, TraceStart, decode_line
from noria.replay import percentile


class BadTrace(ValueError):
    """The file is no iteration log; the text names the file, and the line where there is one."""


@dataclass(slots=True)
class Trace:
    """One run. Requests by the number that rows name them by."""

    start: TraceStart
    requests: dict[int, TraceRequest] = field(default_factory=dict)
    iterations: list[TraceIteration] = field(default_factory=list)

    def between(self, first: int, last: int) -> Trace:
        """Iterations `first` to `last`, counted from 0, both included."""
        return Trace(self.start, self.requests, self.iterations[first : last + 1])

    @property
    def seconds(self) -> float:
        """From the start of the first iteration to the end of the last."""
        first = self.iterations[0]
        return self.iterations[-1].at - first.at + 1e-6 * (first.forward_us + first.select_us)


@dataclass(frozen=True, slots=True)
class Span:
    """An unbroken stay of one request in one lane and one phase: iterations `first` to `last`, both included."""

    lane: int
    request: int
    phase: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run adds up to. Shares are of 1, times in seconds."""

    num_iterations: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int
    seconds: float
    mean_rows: float  # that did work, padding left out
    occupancy: float  # of the batch slots, by rows that did work
    padding: float  # share of all rows
    kv_mean: float  # share of the blocks
    kv_peak: float
    step_median: float
    step_p99: float
    select_median: float
    exchange_median: float


def read(path: Path) -> Trace:
    """The last run in the file that has iterations. Raises BadTrace."""
    runs: list[Trace] = []
    for line in _lines(path):
        if isinstance(line, TraceStart):
            runs.append(Trace(line))
        elif not runs:
            raise BadTrace(f"{path} does not begin as an iteration log does")
        elif isinstance(line, TraceRequest):
            runs[-1].requests[line.number] = line
        else:
            runs[-1].iterations.append(line)
    for run in reversed(runs):
        if run.iterations:
            return run
    raise BadTrace(f"{path} has no iterations yet")


def _lines(path: Path) -> Iterator[TraceLine]:
    try:
        texts = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BadTrace(f"{path}: {(error.strerror or str(error)).lower()}") from None
    for number, text in enumerate(texts, 1):
        try:
            yield decode_line(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if text.endswith(b"\n"):
                raise BadTrace(f"{path}, line {number}: {error}") from None
            # The end of a line that is being written, or that an engine died over.


def spans(trace: Trace) -> list[Span]:
    """The rows of all iterations, joined where a request goes on in its lane and phase."""
    done: list[Span] = []
    open_spans: dict[int, Span] = {}
    for index, iteration in enumerate(trace.iterations):
        for row in iteration.rows:
            span = open_spans.get(row.lane)
            if span and (span.request, span.phase, span.last) == (row.request, row.phase, index - 1):
                open_spans[row.lane] = Span(row.lane, row.request, row.phase, span.first, index)
                continue
            if span:
                done.append(span)
            open_spans[row.lane] = Span(row.lane, row.request, row.phase, index, index)
    return done + list(open_spans.values())


def summarise(trace: Trace) -> Summary:
    iterations, start = trace.iterations, trace.start
    working = [sum(row.phase != "-" for row in iteration.rows) for iteration in iterations]
    rows = sum(len(iteration.rows) for iteration in iterations)
    used = [iteration.blocks_used / start.num_blocks for iteration in iterations]
    steps = [1e-6 * iteration.forward_us for iteration in iterations]
    every = [row for iteration in iterations for row in iteration.rows]
    return Summary(
        num_iterations=len(iterations),
        num_requests=len({row.request for row in every}),
        prompt_tokens=sum(row.num_tokens for row in every if row.phase == "p"),
        output_tokens=sum(row.num_sampled for row in every if row.phase != "-"),
        num_preemptions=sum(len(iteration.preempted) for iteration in iterations),
        seconds=trace.seconds,
        mean_rows=sum(working) / len(iterations),
        occupancy=sum(working) / len(iterations) / start.max_batch_size,
        padding=1 - sum(working) / rows,
        kv_mean=sum(used) / len(used),
        kv_peak=max(used),
        step_median=percentile(steps, 0.5),
        step_p99=percentile(steps, 0.99),
        select_median=percentile([1e-6 * iteration.select_us for iteration in iterations], 0.5),
        exchange_median=percentile([1e-6 * iteration.exchange_us for iteration in iterations], 0.5),
    )
