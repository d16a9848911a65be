"""The events of one response's stream, numbered.

Knows how an event is spelled, not what happens in an answer.
"""

from __future__ import annotations

from typing import Any

import orjson

from noria.gateway.schemas.answers import padded


class EventWriter:
    """Renders events, numbered from 0. Those up to `starting_after` are counted and left out. With `obfuscated` deltas
    carry random letters, so that the size of what goes over the wire says less about the text."""

    def __init__(self, *, starting_after: int = -1, obfuscated: bool = False) -> None:
        self._next = 0
        self._starting_after = starting_after
        self._obfuscated = obfuscated
        self._written: list[bytes] = []

    def event(self, kind: str, **fields: Any) -> None:
        if (number := self._number()) is not None:
            body = orjson.dumps({"type": kind, **fields, "sequence_number": number})
            self._written.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), body))

    def delta(self, kind: bytes, place: bytes, delta: str, logprobs: bytes | None = None) -> None:
        """`place` is where in the response the delta belongs, rendered once: `"item_id":…,"output_index":…`."""
        if (number := self._number()) is None:
            return
        scores = b"" if logprobs is None else b',"logprobs":' + logprobs
        event = b'event: %s\ndata: {"type":"%s",%s,"delta":%s%s,"sequence_number":%d}\n\n' % (
            kind,
            kind,
            place,
            orjson.dumps(delta),
            scores,
            number,
        )
        self._written.append(padded(event) if self._obfuscated else event)

    def take(self) -> bytes:
        """What was written since the last time."""
        written = b"".join(self._written)
        self._written.clear()
        return written

    def _number(self) -> int | None:
        number = self._next
        self._next += 1
        return number if number > self._starting_after else None
