"""What the ledger says of a request that ended: whom to charge, and for what. Knows one request at a time."""

from __future__ import annotations

from tests.engine.wire.reference.requests import Request

NO_TIMES = (0, "", 0, 0)
"""Of one that ended in the store: nothing from the cache, no engine, no time."""


def entry(
    request: Request, now: int, output: int, reason: str, details: tuple[int, str, int, int] = NO_TIMES
) -> dict[str, str]:
    """`details`: tokens from the cache, engine, ms to the first token and from there. What no engine ever took has used
    nothing; who left early pays for what he has had, and `why` says better than "cancelled" what happened."""
    cached, engine, prefill, decode = details
    billed = 0 if request.claimed is None else request.billed
    waited = (now if request.claimed is None else request.claimed) - request.accepted
    fields = {
        "id": request.id,
        "account": request.account,
        "class": request.service_class,
        "at": now,
        "prompt": billed,
        "cached": min(cached, billed),
        "output": output if request.counted is None else min(output, request.counted),
        "reason": request.why if reason == "cancelled" and request.why else reason,
        "engine": engine,
        "queue_ms": waited,
        "prefill_ms": prefill,
        "decode_ms": decode,
    }
    return {name: str(value) for name, value in fields.items()}
