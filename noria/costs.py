"""What an iteration costs, as a sum over its rows, and how to find that out from an engine's iteration log.

Knows rows and seconds; no scheduler, no workload.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from noria.engine.scheduling.batch import Batch
from noria.engine.trace import TraceIteration
from noria.trace_file import Trace

if TYPE_CHECKING:  # numpy comes with the extras
    from numpy import float64
    from numpy.typing import NDArray

OUTLIER = 4.0  # times the median deviation: an iteration that something else on the machine held up
ROUNDS = 4  # of fitting and leaving out


class BadCosts(ValueError):
    """A file of costs, or a log, that gives no cost model; the text is one line."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one iteration, a sum over its rows. The defaults are the demo model's on two CPU cores."""

    iteration: float = 0.047  # weights read once, whatever the batch
    decode_row: float = 0.008
    prompt_token: float = 0.0025
    kv_token: float = 5e-6  # per token of context that a decoding row attends to
    prompt_pair: float = 0.0  # per pair of a prompt token and a token that it attends to

    def seconds(self, batch: Batch) -> float:
        return self.of((row.is_decode, row.num_tokens, row.start + row.num_tokens) for row in batch.rows)

    def of(self, rows: Iterable[tuple[bool, int, int]]) -> float:
        """`rows` are (decodes, new tokens, tokens attended to by the last of them)."""
        prices = (self.iteration, self.decode_row, self.prompt_token, self.kv_token, self.prompt_pair)
        return sum(part * price for part, price in zip(_parts(rows), prices, strict=True))

    def save(self, file: Path, **about: object) -> None:
        """JSON, with whatever else is worth knowing of the measurement."""
        file.write_bytes(msgspec.json.format(msgspec.json.encode({**asdict(self), "about": about})) + b"\n")

    @staticmethod
    def load(file: Path) -> CostModel:
        """Raises BadCosts."""
        try:
            return msgspec.json.decode(file.read_bytes(), type=CostModel)
        except (OSError, msgspec.DecodeError) as error:
            raise BadCosts(f"{file}: {error}") from None


@dataclass(frozen=True, slots=True)
class Fit:
    """`error` is the median of |predicted - measured| / measured; `held_up` is the share of the measured time that the
    fit alone would not explain, and that the prices were raised by."""

    cost: CostModel
    num_iterations: int
    num_left_out: int
    error: float
    held_up: float


_NUM_PRICES = len(fields(CostModel))


def _parts(rows: Iterable[tuple[bool, int, int]]) -> tuple[float, float, float, float, float]:
    """How often an iteration pays each price, in the order of the fields."""
    decodes, read, context, pairs = 0, 0, 0, 0.0
    for is_decode, tokens, last in rows:
        if is_decode:
            decodes += tokens
            context += last
        else:
            read += tokens
            pairs += tokens * (last - (tokens - 1) / 2)
    return 1, decodes, read, context, pairs


def fit(traces: Sequence[Trace]) -> Fit:
    """Least squares of relative errors over all iterations, no price below zero, iterations that were held up left
    out. All prices are then raised alike until they add up to the measured time, since what holds an engine up takes
    time from its requests. Raises BadCosts where the logs are too short or too much alike to tell prices apart."""
    import numpy

    iterations = [iteration for trace in traces for iteration in trace.iterations]
    parts = numpy.array([_parts(rows_of(iteration)) for iteration in iterations], dtype=float)
    seconds = numpy.array([1e-6 * (iteration.forward_us + iteration.select_us) for iteration in iterations])
    if len(iterations) < 10 * _NUM_PRICES:
        raise BadCosts(f"{len(iterations)} iterations are too few to fit costs to")
    kept = numpy.ones(len(seconds), dtype=bool)
    for _ in range(ROUNDS):
        prices = _solve(parts[kept] / seconds[kept, None])
        errors = numpy.abs(parts @ prices - seconds) / seconds
        kept = errors <= OUTLIER * numpy.median(errors) + 1e-9
    explained = float((parts @ prices).sum() / seconds.sum())
    cost = CostModel(*(float(price) / explained for price in prices))
    return Fit(cost, len(seconds), int((~kept).sum()), float(numpy.median(errors)), 1 - explained)


def _solve(relative: NDArray[float64]) -> NDArray[float64]:
    """Prices >= 0 for which every row of `relative` comes as near to 1 as it can: what would be negative is left out,
    the most negative first."""
    import numpy

    used = [index for index in range(relative.shape[1]) if relative[:, index].any()]
    while True:
        found = numpy.linalg.lstsq(relative[:, used], numpy.ones(len(relative)), rcond=None)[0]
        if found.min() >= 0:
            prices: NDArray[float64] = numpy.zeros(relative.shape[1])
            prices[used] = found
            return prices
        del used[int(found.argmin())]
        if not used:
            raise BadCosts("no cost model fits these iterations")


def rows_of(iteration: TraceIteration) -> list[tuple[bool, int, int]]:
    """A logged iteration's rows as the cost model takes them."""
    return [(row.phase != "p", row.num_tokens, row.context) for row in iteration.rows]
