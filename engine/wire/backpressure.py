"""What a full queue answers: the errors, and how long to wait, from the work ahead and the measured drain rate.

Knows numbers only: no client, no key.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RETRY_AFTER = 60.0
UNKNOWN_RETRY_AFTER = 5.0
"""Seconds to wait where nothing has been finished yet, so that no rate is known."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait at most, in requests and in bytes of their records: in one pool, and of one tenant in it."""

    depth: int = 10_000
    size: int = 256 * 1024 * 1024
    tenant_depth: int = 5_000
    tenant_size: int = 128 * 1024 * 1024


class QueueFull(Exception):
    """The pool's queue is at its depth or size limit. `retry_after` is in seconds, jittered, 60 at most."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TenantQueueFull(QueueFull):
    """The tenant's part of the pool's queue is at its depth or size limit."""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where a waiting request stands, as an estimate: what would be claimed before it if nothing more came.

    Exact for one tenant in one class; between tenants and classes it follows their shares and the mean size of what
    waits. `eta_seconds` is when it would be claimed at the measured drain rate (None: none measured yet).
    """

    ahead: int
    tokens_ahead: int
    eta_seconds: float | None


def full(model_id: str, reply: Sequence[bytes | int]) -> QueueFull:
    """The error for ENQUEUE's refusal: [kind, requests waiting, tokens ahead, tokens drained per second]."""
    kind, depth, tokens, rate = reply[0], int(reply[1]), float(reply[2]), float(reply[3])
    if kind == b"tenant_full":
        message = f"{depth} requests of this tenant are waiting for {model_id}"
        return TenantQueueFull(message, _retry_after(tokens, rate))
    message = f"the queue of {model_id} is full: {depth} requests are waiting"
    return QueueFull(message, _retry_after(tokens, rate))


def position(reply: Sequence[bytes | int]) -> QueuePosition:
    """POSITION's answer: [requests ahead, tokens ahead, tokens drained per second]."""
    ahead, tokens, rate = int(reply[0]), int(float(reply[1])), float(reply[2])
    return QueuePosition(ahead, tokens, tokens / rate if rate > 0 else None)


def _retry_after(tokens: float, rate: float) -> float:
    seconds = tokens / rate if rate > 0 else UNKNOWN_RETRY_AFTER
    return min(MAX_RETRY_AFTER, max(1.0, seconds) * random.uniform(0.8, 1.2))
