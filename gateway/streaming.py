"""Server-sent events over ASGI: writes chunks as they come, notices a client that leaves, ends every stream once.

Knows no chunk's shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from prometheus_client import Gauge
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from noria.engine.wire.messages import Usage
from noria.gateway.choice import Delta
from noria.gateway.dependencies import cancel_and_wait, client_left
from noria.gateway.errors import UNEXPECTED, GatewayError, envelope
from noria.gateway.generation import Generation
from noria.gateway.http.protocol import PUSH
from noria.gateway.queue_info import QueueInfo

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"

_LAST_WORDS = 2.0
"""Seconds that a client has to take in the error of a stream that ended from outside; one that does not read cannot."""


Push = Callable[[bytes], bool]


class Events(Protocol):
    """Renders one answer as whole events; stateful, called in this order."""

    def opening(self) -> bytes: ...

    def of(self, deltas: Sequence[Delta]) -> bytes: ...

    async def closing(self, usage: Usage) -> bytes: ...

    def failed(self, error: GatewayError) -> bytes:
        """The last word of an answer that breaks off."""
        return b"data: " + envelope(error) + b"\n\n"


class EventStream(Response):
    """Enters the generation before the first byte, so that a refused request still has its own HTTP status, and
    leaves it in any case. An error inside becomes an error event, and no [DONE] follows it.

    `refusable`: an engine may yet refuse the request, so that its first word decides on the status as well."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        events: Events,
        open_streams: Gauge,
        queue_info: QueueInfo | None = None,
        *,
        refusable: bool = False,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._open_streams = open_streams
        self._queue_info = queue_info
        self._refusable = refusable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            if self._queue_info is not None:
                self.headers.update(await self._queue_info.headers())
            push = scope.get("extensions", {}).get(PUSH, _never)
            writer = _Writer(self._generation, self._events, send, push)
            tasks = [
                asyncio.ensure_future(self._write(writer)),
                asyncio.ensure_future(client_left(receive)),
                asyncio.ensure_future(self._generation.failed.wait()),
            ]
            if self._queue_info is not None:
                tasks.append(asyncio.ensure_future(self._comment(self._queue_info, writer)))
            writing, gone, failed = tasks[:3]
            self._open_streams.inc()
            try:
                await asyncio.wait((writing, gone, failed), return_when=asyncio.FIRST_COMPLETED)
                if failed.done() and not gone.done():
                    await asyncio.wait((writing, gone), timeout=_LAST_WORDS, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
            finally:
                self._open_streams.dec()
                await cancel_and_wait(*tasks)

    async def _write(self, writer: _Writer) -> bool:
        if self._refusable:
            await self._generation.begun()
        return await writer.run(self.status_code, self.raw_headers)

    async def _comment(self, queue_info: QueueInfo, writer: _Writer) -> bool:
        async for comment in queue_info.comments():
            if self._generation.heard:
                break
            writer.comment(comment)
        return True


def _never(_: bytes) -> bool:
    """Beneath another server, whose connections are not to be had."""
    return False


class _Writer:
    """Writes what a generation has, in two ways. As a rule straight from the pump, when frames come: the chunk is
    rendered and sent without a task being woken for it. Where the connection takes no more at the moment, and for the
    beginning and the end, a task of its own writes; what comes meanwhile waits in the generation and goes out as one.
    """

    def __init__(self, generation: Generation, events: Events, send: Send, push: Push) -> None:
        self._generation = generation
        self._events = events
        self._send = send
        self._push = push
        self._busy = True  # the task writes, or is about to: the pump keeps out
        self._pending = b""
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    async def run(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        try:
            if opening := self._events.opening():
                await self._write(opening)
            self._generation.listener = self._news
            await self._follow()
            await self._write(await self._events.closing(self._generation.usage()))
        except GatewayError as error:
            await self._write(self._events.failed(error))
        except Exception:
            log.exception("a stream failed")
            await self._write(self._events.failed(UNEXPECTED))
        finally:
            self._generation.listener = None
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    def comment(self, line: bytes) -> None:
        """A line that readers of events pass over; dropped if there is anything else to write."""
        if not self._busy:
            self._push(line)

    async def _follow(self) -> None:
        while True:
            if self._error is not None:
                raise self._error
            pending, self._pending = self._pending, b""
            if pending:
                await self._write(pending)
                continue
            if deltas := self._generation.take():
                if event := self._events.of(deltas):
                    await self._write(event)
                continue
            if self._generation.over:
                return
            self._wake.clear()
            self._busy = False
            await self._wake.wait()

    def _news(self) -> None:
        """Called by the pump."""
        if self._busy:
            return
        try:
            deltas = self._generation.take()
            event = self._events.of(deltas) if deltas else b""
        except Exception as error:
            self._error = error
            self._rouse()
            return
        if event and not self._push(event):
            self._pending = event
            self._rouse()
        elif self._generation.over:
            self._rouse()

    def _rouse(self) -> None:
        self._busy = True
        self._wake.set()

    async def _write(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
