"""One line of a batch until it has its answer: asked again while that is worth it, answered only once.

Knows one line; knows no batch's state and no store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import orjson

from noria.gateway.batches.lines import Line
from noria.gateway.inner_call import InnerCall, Reply

T = TypeVar("T")

_PAUSES = (0.5, 30.0)
"""Seconds before the second attempt, which doubles from one to the next, and at most."""

Ask = Callable[[InnerCall], Awaitable[Reply]]


class Stop:
    """Why and how the lines of a batch are to come to an end: `asked` at once, `given_up` when patience has ended."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    def ask(self, patience: float) -> None:
        """Begin no more attempts; what runs has `patience` seconds."""
        if not self.asked.is_set():
            self.asked.set()
            asyncio.get_running_loop().call_later(patience, self.given_up.set)


async def answer(
    line: Line, endpoint: str, key: str, tenant: object, ask: Ask, slots: asyncio.Semaphore, stop: Stop
) -> tuple[Reply, str] | None:
    """The last reply to the line's request and the Idempotency-Key that it came under; None where `stop` came first.

    The key ties every attempt, this runner's or another's, to the same generation. Refusals that pass (a full queue, an
    engine or a store that is away, a wait that was too long) are no answer.
    """
    body, attempt, lost = orjson.dumps(line.body), 0, 0
    while not stop.asked.is_set():
        # Answers are kept under their key for a day; one that was lost all the same is made anew, under the next.
        current = key if not lost else f"{key}/{lost}"
        call = InnerCall(endpoint, body, {"idempotency-key": current}, tenant)
        async with slots:
            reply = None if stop.asked.is_set() else await _unless(stop.given_up, ask(call))
        if reply is None:
            return None
        code = error_code(reply)
        if code == "idempotency_result_expired":
            lost += 1
            continue
        if not passes(reply.status, code):
            return reply, current
        await _unless(stop.asked, asyncio.sleep(_pause(attempt, reply.headers)))
        attempt += 1
    return None


def passes(status: int, code: str | None) -> bool:
    """Whether a later attempt may well be answered. A model was there when the batch was checked: if it is not found,
    its engines are away. A budget that is used up stays so for long."""
    if code == "insufficient_quota":
        return False
    is_away = status == 404 and code == "model_not_found"
    return status in (408, 429, 503) or is_away or code == "idempotency_key_in_use"


def error_code(reply: Reply) -> str | None:
    if reply.status < 400:
        return None
    error = orjson.loads(reply.body).get("error")
    return error.get("code") if isinstance(error, dict) else None


def counts(reply: Reply) -> dict[str, int]:
    """What the reply adds to a batch's counts."""
    if reply.status >= 400:
        return {"failed": 1}
    found = orjson.loads(reply.body).get("usage") or {}
    given, written = (_details(found, *names) for names in (("prompt", "input"), ("completion", "output")))
    return {
        "completed": 1,
        "input_tokens": found.get("prompt_tokens", found.get("input_tokens", 0)),
        "cached_tokens": given.get("cached_tokens") or 0,
        "output_tokens": found.get("completion_tokens", found.get("output_tokens", 0)),
        "reasoning_tokens": written.get("reasoning_tokens") or 0,
    }


def _details(usage: Mapping[str, Any], *kinds: str) -> Mapping[str, Any]:
    return next((found for kind in kinds if (found := usage.get(f"{kind}_tokens_details"))), {})


def _pause(attempt: int, headers: Mapping[str, str]) -> float:
    first, most = _PAUSES
    told = float(headers.get("retry-after-ms", 0)) / 1000
    backoff: float = min(most, first * 2 ** min(attempt, 10))
    return max(told, backoff) * random.uniform(0.75, 1.25)


async def _unless(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, which is cancelled when the event comes first: then None."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
