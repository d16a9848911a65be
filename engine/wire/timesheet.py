"""What an engine tells the ledger of a request that ends: why it ended, tokens from the cache, and the time it took.

Only of requests that belong to an account; of all others nothing is kept. Knows frames; no client and no key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from noria.engine.wire.messages import TokenFrame

Ended: TypeAlias = tuple[str, int, int, str]
"""What FINISH takes: id, epoch, output tokens, and `cached reason prefill_ms decode_ms`, empty without an account."""


@dataclass(slots=True)
class _Times:
    claimed: float  # monotonic
    first: float | None = None  # when its first token of this engine was published
    last: float | None = None


class Timesheet:
    """One per engine. Prefill is from the claim to the first token, decode from there to the last. A request that moved
    has the times of the engine that ended it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, _Times] = {}

    def open(self, request_id: str) -> None:
        """Claimed just now."""
        self._times[request_id] = _Times(self._clock())

    def close(self, request_id: str) -> None:
        self._times.pop(request_id, None)

    def clear(self) -> None:
        self._times.clear()

    def note(self, frames: Sequence[TokenFrame]) -> None:
        """New frames, about to be published."""
        if not self._times:
            return
        now = self._clock()
        for frame in frames:
            times = self._times.get(frame.request_id)
            if times is not None:
                times.first = times.first or now
                times.last = now

    def ended(self, frame: TokenFrame) -> Ended:
        """The end that a last frame tells."""
        output, times = frame.seq + len(frame.token_ids), self._times.get(frame.request_id)
        if times is None:
            return frame.request_id, frame.epoch, output, ""
        first, last = times.first or times.claimed, times.last or times.claimed
        return frame.request_id, frame.epoch, output, _details(frame, first - times.claimed, last - first)


def without_times(frame: TokenFrame, epoch: int, output: int, *, is_accounted: bool) -> Ended:
    """The end of a request whose last frame an engine recorded that then died."""
    return frame.request_id, epoch, output, _details(frame, 0.0, 0.0) if is_accounted else ""


def _details(frame: TokenFrame, prefill: float, decode: float) -> str:
    cached = 0 if frame.usage is None else frame.usage.cached_tokens
    reason = "error" if frame.finish is None else frame.finish.value
    return f"{cached} {reason} {round(prefill * 1000)} {round(decode * 1000)}"
