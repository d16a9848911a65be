"""How a client wants its answer delivered, beside what it asks for: the headers of a generating request.

    Idempotency-Key        a repeat with this key and the same body gets the same answer, from any gateway
    X-Noria-Resumable      a stream whose events carry ids, so that it can be gone on with
    Last-Event-ID          go on with such a stream behind this event
    X-Noria-Queue-Info     say how many requests are ahead while this one waits

Knows no store and no answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from noria.gateway.errors import InvalidRequest

MAX_KEY = 255
"""Characters in an Idempotency-Key at most, as Stripe has it."""

_MAX_EVENT_ID = 8192


@dataclass(frozen=True, slots=True)
class Delivery:
    """`digest` stands for endpoint and body. `key` and `last_event` are None unless given."""

    digest: bytes
    stream: bool
    key: str | None = None
    last_event: str | None = None
    resumable: bool = False
    queue_info: bool = False

    @property
    def logged(self) -> bool:
        """Whether the request's frames must be kept for a while, so that more than one connection can read them."""
        return self.key is not None or self.resumable or self.last_event is not None


def delivery(headers: Mapping[str, str], endpoint: str, body: Mapping[str, Any], *, stream: bool) -> Delivery:
    """What the headers (by lower-case name) say. Raises `InvalidRequest` for a value that means nothing.

    Two bodies are the same if they are equal as JSON, whatever their spacing and the order of their fields.
    """
    key, last_event = headers.get("idempotency-key"), headers.get("last-event-id") or None
    if key is not None and not 0 < len(key) <= MAX_KEY:
        message = f"Invalid 'Idempotency-Key': between 1 and {MAX_KEY} characters are allowed."
        raise InvalidRequest(message, param="Idempotency-Key", code="invalid_value")
    if last_event is not None and (not stream or len(last_event) > _MAX_EVENT_ID):
        why = "only a stream can be gone on with" if not stream else "it is too long"
        raise InvalidRequest(f"Invalid 'Last-Event-ID': {why}.", param="Last-Event-ID", code="invalid_value")
    resumable = _flag(headers, "X-Noria-Resumable")
    if resumable and not stream:
        message = "Invalid 'X-Noria-Resumable': it is only allowed when 'stream' is true."
        raise InvalidRequest(message, param="X-Noria-Resumable", code="invalid_value")
    digest = b""
    if key is not None or resumable or last_event is not None:
        digest = hashlib.sha256(endpoint.encode() + b"\0" + orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).digest()
    return Delivery(digest, stream, key, last_event, resumable, _flag(headers, "X-Noria-Queue-Info"))


def _flag(headers: Mapping[str, str], name: str) -> bool:
    value = headers.get(name.lower(), "false").strip().lower()
    if value in ("true", "1"):
        return True
    if value in ("false", "0", ""):
        return False
    raise InvalidRequest(f"Invalid '{name}': expected true or false.", param=name, code="invalid_value")
