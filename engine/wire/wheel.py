"""The wheel as watchers see it: what an engine's last iterations did, published to whoever listens and kept by nobody.

Both ends of the channel and the record on it, which is JSON: a gateway passes it on as it is. Knows no scheduling.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from noria.engine.wire import keys
from noria.engine.wire.connection import AsyncStore, Store

SILENCE = 10.0
"""Seconds without a word after which a subscription is made anew. Watched engines speak every second."""


class WheelRequest(msgspec.Struct, frozen=True):
    """One request in the batch. `id` is the queue's: the answer's without its prefix, and the number of the choice."""

    id: str
    tenant: str
    service_class: str
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    max_tokens: int


class WheelRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's part in an iteration: `[lane, request, phase, tokens, context, end]`."""

    lane: int  # slot of the batch, from 0; kept until the request ends or is preempted
    request: int  # place in `requests` of the same message
    phase: Literal["p", "d", "-"]  # reads its prompt, takes its next token, padding of a closed batch
    num_tokens: int
    context: int  # tokens of it computed so far, prompt and output together
    end: str  # why it left with this iteration: a finish reason, or "preempted"; empty: it stays


class WheelIteration(msgspec.Struct, frozen=True):
    """`number` counts the iterations that were watched: a gap shows that some in between are left out."""

    number: int
    at: float  # Unix seconds, when the results were folded back
    forward_us: int  # from the control message made to the results read
    blocks_used: int  # KV blocks that requests hold afterwards
    waiting: int  # requests that the engine holds outside the batch
    rows: list[WheelRow]


class WheelNews(msgspec.Struct, frozen=True):
    """One message; it can be read without any before it. Without `iterations` it says that the engine is there."""

    model: str
    engine: str
    policy: str
    max_batch_size: int
    num_blocks: int
    block_size: int  # tokens
    at: float  # Unix seconds
    requests: list[WheelRequest]
    iterations: list[WheelIteration]


class WheelChannel:
    """An engine's end. One thread."""

    def __init__(self, redis_url: str, model_id: str) -> None:
        self._store = Store(redis_url)
        self._channel = keys.wheel(model_id)

    def publish(self, news: WheelNews) -> int:
        """How many heard it. Raises BrokerUnavailable and StoreFault."""
        (listeners,) = self._store.run(("PUBLISH", self._channel, msgspec.json.encode(news)))
        return int(listeners)

    def close(self) -> None:
        self._store.close()


class WheelSubscription:
    """A gateway's end: the messages of all engines."""

    def __init__(self, redis_url: str) -> None:
        self._store = AsyncStore(redis_url)

    def news(self) -> AsyncIterator[bytes]:
        """`WheelNews` as JSON, from now on, until all is silent for long: then ask again. Raises BrokerUnavailable."""
        return self._store.messages(keys.WHEELS, SILENCE)

    async def close(self) -> None:
        await self._store.close()
