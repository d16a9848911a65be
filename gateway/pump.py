"""The one reader of this gateway's frame stream: hands each frame to the generation that waits for it.

Also carries cancellations to the store in the background, since who cancels is usually gone. Knows no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, Protocol

import structlog

from noria.engine.wire.broker import BrokerUnavailable, GatewayBroker
from noria.engine.wire.messages import TokenFrame

log = structlog.get_logger(__name__)

_CANCEL_TRIES = 10


class FrameSink(Protocol):
    """Takes the frames of the requests it is registered for, without blocking."""

    def accept(self, frame: TokenFrame) -> None: ...

    def close(self) -> None: ...

    async def resend_if_silent(self, seconds: float) -> None: ...


class FramePump:
    """One per gateway process."""

    def __init__(self, broker: GatewayBroker) -> None:
        self._broker = broker
        self._sinks: dict[str, FrameSink] = {}
        self._errands: set[asyncio.Task[None]] = set()

    def register(self, request_ids: Iterable[str], sink: FrameSink) -> None:
        for request_id in request_ids:
            self._sinks[request_id] = sink

    def unregister(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._sinks.pop(request_id, None)

    def sinks(self) -> Iterator[FrameSink]:
        """Every live sink once."""
        return iter(dict.fromkeys(self._sinks.values()))

    async def run(self) -> None:
        """Read until cancelled; frames of requests that nobody waits for any more are dropped."""
        async for frames in self._broker.frames():
            for frame in frames:
                sink = self._sinks.get(frame.request_id)
                if sink is not None:
                    sink.accept(frame)

    def cancel(self, model_id: str, request_id: str) -> None:
        """Tell the store in the background that nobody wants this request any more."""
        self._spawn(self._cancel(model_id, request_id))

    async def drain(self, timeout: float) -> None:
        """Wait for the cancellations on their way, `timeout` seconds at most."""
        if self._errands:
            await asyncio.wait(self._errands, timeout=timeout)

    async def _cancel(self, model_id: str, request_id: str) -> None:
        for attempt in range(_CANCEL_TRIES):
            try:
                return await self._broker.cancel(model_id, request_id)
            except BrokerUnavailable:
                await asyncio.sleep(0.2 * 2 ** min(attempt, 5))
        log.warning("cancellation lost: the store is away", request_id=request_id)

    def _spawn(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
