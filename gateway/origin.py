"""Where a generation's frames come from: requests that it puts on the queue itself, or those of an earlier connection.

Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from noria.engine.wire.broker import BrokerUnavailable, GatewayBroker, QueueFull, StoreFault, TenantQueueFull
from noria.engine.wire.messages import GenerationRequest, ModelCard
from noria.gateway.errors import STORE_AWAY, UNEXPECTED, GatewayError, Overloaded, RateLimited
from noria.gateway.pump import FramePump, FrameSink
from noria.gateway.tenancy.admission import Admission
from noria.gateway.tickets import Ticket

log = structlog.get_logger(__name__)

_QUEUE_FULL = "The queue of this model is full. Please try again."
_TENANT_FULL = "You have too many requests waiting for this model. Please try again."

_ADMISSION_TIME = 2.0
"""Seconds in which the store must take a request; a store that is only slow would otherwise hold a client for long."""

_FIRST_LOOK = 0.3
"""Seconds to learn that a log is gone while the answer's status can still say so."""

_OUTAGE = 15.0
"""Seconds without the store after which a follower gives up; its client may come back."""


class Origin(Protocol):
    """`open` raises a `GatewayError` and then has left nothing behind; `fail` takes one that comes later."""

    async def open(self, sink: FrameSink, fail: Callable[[GatewayError], None]) -> None: ...

    async def offer(self, request_id: str) -> None:
        """Once more to the store, which may have forgotten it; a no-op where it has not."""

    def leave(self) -> None:
        """Read no more frames; the requests go on."""

    def cancel(self, counts: Mapping[str, int], why: str = "") -> None:
        """Nobody wants these any more; each with the output tokens that its client has had."""


class Queued:
    """Requests of this gateway's own, all put on the queue or none."""

    def __init__(
        self,
        broker: GatewayBroker,
        pump: FramePump,
        card: ModelCard,
        requests: Sequence[GenerationRequest],
        ticket: Ticket | None,
        admission: Admission | None = None,
    ) -> None:
        self._broker = broker
        self._pump = pump
        self._card = card
        self._admission = admission
        self._requests = {request.id: request for request in requests}
        self._ticket = ticket
        self._queued: set[str] = set()

    async def open(self, sink: FrameSink, fail: Callable[[GatewayError], None]) -> None:
        self._pump.register(self._requests, sink)
        try:
            async with asyncio.timeout(_ADMISSION_TIME):
                await self._admit()
                for request in list(self._requests.values()):
                    await self._enqueue(request)
                if self._ticket is not None:
                    await self._ticket.admitted()
        except GatewayError:  # it is not let in: nothing is reserved, nothing waits
            self.leave()
            self._forget()
            raise
        except TenantQueueFull as error:
            self._take_back(refused=True)
            raise RateLimited(_TENANT_FULL, retry_after=error.retry_after) from error
        except QueueFull as error:
            self._take_back(refused=True)
            raise Overloaded(_QUEUE_FULL, retry_after=error.retry_after) from error
        except (BrokerUnavailable, TimeoutError) as error:
            self._take_back()
            raise Overloaded(STORE_AWAY, retry_after=2) from error
        except BaseException:
            self._take_back()
            raise

    async def offer(self, request_id: str) -> None:
        await self._enqueue(self._requests[request_id])

    def leave(self) -> None:
        self._pump.unregister(self._requests)
        if self._admission is not None:
            self._admission.over()

    def cancel(self, counts: Mapping[str, int], why: str = "") -> None:
        for request_id, counted in counts.items():
            self._pump.cancel(self._card.pool, request_id, counted, why)

    async def _admit(self) -> None:
        """Reserve what the requests may use, and let none have more than is granted."""
        if self._admission is None:
            return
        granted = await self._admission.admit()
        if granted is not None:
            self._requests = {i: _cut(request, granted) for i, request in self._requests.items()}

    async def _enqueue(self, request: GenerationRequest) -> None:
        await self._broker.enqueue(request, self._card)
        self._queued.add(request.id)

    def _take_back(self, *, refused: bool = False) -> None:
        """Of what is `refused` we know that it does not wait. For the rest somebody looks who gives back what nobody
        took up."""
        self.leave()
        admission, never = self._admission, [i for i in self._requests if i not in self._queued]
        if admission is not None and refused:
            self._pump.errand("withdrawal", lambda: admission.withdraw(never))
        self.cancel(dict.fromkeys(self._requests, 0))
        self._forget()

    def _forget(self) -> None:
        ticket = self._ticket
        if ticket is not None:
            self._pump.errand("forgetting", lambda: ticket.lost(None))


def _cut(request: GenerationRequest, most: int) -> GenerationRequest:
    sampling = request.sampling
    if sampling.max_tokens <= most:
        return request
    fewer = msgspec.structs.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
    return msgspec.structs.replace(request, sampling=fewer)


class Followed:
    """Requests that an earlier connection, maybe at another gateway, put on the queue: read from their logs, or from
    the answer that was kept."""

    def __init__(
        self, broker: GatewayBroker, pump: FramePump, card: ModelCard, request_ids: Sequence[str], ticket: Ticket
    ) -> None:
        self._broker = broker
        self._pump = pump
        self._card = card
        self._ids = request_ids
        self._ticket = ticket
        self._readers: list[asyncio.Task[None]] = []
        self._lost: GatewayError | None = None

    async def open(self, sink: FrameSink, fail: Callable[[GatewayError], None]) -> None:
        if self._ticket.answer is not None:
            for frame in self._ticket.answer:
                sink.accept(frame)
            return
        heard = [asyncio.Event() for _ in self._ids]
        given = zip(self._ids, heard, strict=True)
        self._readers = [asyncio.ensure_future(self._read(i, event, sink, fail)) for i, event in given]
        waits = [asyncio.ensure_future(event.wait()) for event in heard]
        await asyncio.wait(waits, timeout=_FIRST_LOOK)
        for wait in waits:
            wait.cancel()
        if self._lost is not None:
            self.leave()
            raise self._lost

    async def offer(self, request_id: str) -> None:
        """Nothing: who put it on the queue does that."""

    def leave(self) -> None:
        for reader in self._readers:
            reader.cancel()

    def cancel(self, counts: Mapping[str, int], why: str = "") -> None:
        for request_id, counted in counts.items():
            self._pump.cancel(self._card.pool, request_id, counted, why)

    async def _read(
        self, request_id: str, heard: asyncio.Event, sink: FrameSink, fail: Callable[[GatewayError], None]
    ) -> None:
        until = 0.0  # monotonic; set while the store is away
        while True:
            try:
                async for frames in self._broker.log_frames(request_id):  # again from the first: readers pass over
                    until = 0.0
                    for frame in frames:
                        sink.accept(frame)
                    sink.flush()
                    heard.set()
                return
            except KeyError:
                self._lost = self._ticket.gone()
                break
            except StoreFault:
                log.exception("a log cannot be read", request=request_id)
                self._lost = UNEXPECTED
                break
            except BrokerUnavailable:
                now = time.monotonic()
                until = until or now + _OUTAGE
                if now > until or not heard.is_set():
                    self._lost = Overloaded(STORE_AWAY, retry_after=2)
                    break
            await asyncio.sleep(0.5)
        heard.set()
        fail(self._lost)
