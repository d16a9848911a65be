"""The shapes in which queues, engines and dead letters are shown, by the API and by `noria queue --json`.

Knows no store.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec

from noria.engine.wire.queue_view import DeadLetter, PoolView


def shown_pool(pool: PoolView) -> dict[str, Any]:
    """With the engines' figures, which are records of the wire, as plain values."""
    record = asdict(pool)
    for engine in record["engines"]:
        engine["stats"] = msgspec.to_builtins(engine["stats"])
        engine["lease_seconds"] = round(engine["lease_seconds"], 3)
    return record


def shown_letter(letter: DeadLetter, *, whole: bool = False) -> dict[str, Any]:
    """A letter's fields. The prompt, which may be private, only where the whole is asked for."""
    fields: dict[str, Any] = {
        "id": letter.request_id,
        "model": letter.model,
        "entry": letter.entry,
        "died": died(letter),
        "attempts": letter.attempts,
        "engines": letter.engines,
        "error": letter.error,
    }
    if letter.request is not None:
        request = letter.request
        fields |= {"tenant": request.tenant, "class": request.service_class, "prompt_tokens": len(request.prompt)}
        fields["max_tokens"] = request.sampling.max_tokens
        if whole:
            fields |= {"prompt": request.prompt, "sampling": msgspec.to_builtins(request.sampling)}
    return fields


def died(letter: DeadLetter) -> str:
    """When it was given up, for people."""
    return datetime.fromtimestamp(letter.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
