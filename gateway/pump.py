"""The one reader of this gateway's frame stream: hands each frame to the generation that waits for it.

Also carries errands to the store in the background, such as cancellations, since who cancels is usually gone. Knows no
text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol

import structlog

from noria.engine.wire.broker import BrokerUnavailable, GatewayBroker, StoreFault
from noria.engine.wire.messages import TokenFrame

log = structlog.get_logger(__name__)

_TRIES = 10


class FrameSink(Protocol):
    """Takes the frames of the requests it is registered for, without blocking."""

    def accept(self, frame: TokenFrame) -> None: ...

    def flush(self) -> None:
        """All frames that came together have been accepted: now is the time to write. Does not raise."""

    def cut_off(self) -> None:
        """The gateway ends: let go of everything, with an honest word to the client."""

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
        """Read until cancelled."""
        async for frames in self._broker.frames():
            self.deliver(frames)

    def deliver(self, frames: Sequence[TokenFrame]) -> None:
        """Frames of requests that nobody waits for any more are dropped."""
        touched: dict[FrameSink, None] = {}
        for frame in frames:
            sink = self._sinks.get(frame.request_id)
            if sink is not None:
                sink.accept(frame)
                touched[sink] = None
        for sink in touched:
            sink.flush()

    def cancel(self, model_id: str, request_id: str, counted: int | None = None, why: str = "") -> None:
        """Tell the store in the background that nobody wants this request any more; see `GatewayBroker.cancel`."""
        self.errand("cancellation", lambda: self._broker.cancel(model_id, request_id, counted, why))

    def errand(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do in the background what the store must be told; tried again for half a minute while the store is away."""
        task = asyncio.ensure_future(self._carry(name, work))
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def drain(self, timeout: float) -> None:
        """Wait for the errands on their way, `timeout` seconds at most."""
        if self._errands:
            await asyncio.wait(self._errands, timeout=timeout)

    async def _carry(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        for attempt in range(_TRIES):
            try:
                return await work()
            except BrokerUnavailable:
                await asyncio.sleep(0.2 * 2 ** min(attempt, 5))
            except StoreFault:
                log.exception("an errand failed", errand=name)
                return
        log.warning("an errand was lost: the store is away", errand=name)
