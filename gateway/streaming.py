"""Server-sent events over ASGI: writes chunks as they come, notices a client that leaves, ends every stream once.

Knows no chunk's shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog
from prometheus_client import Gauge
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from noria.gateway.dependencies import cancel_and_wait, client_left
from noria.gateway.errors import UNEXPECTED, GatewayError, envelope
from noria.gateway.generation import Generation

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"

_LAST_WORDS = 2.0
"""Seconds that a client has to take in the error of a stream that ended from outside; one that does not read cannot."""


class EventStream(Response):
    """Enters the generation before the first byte, so that a refused request still has its own HTTP status, and
    leaves it in any case. `events` yields the bytes of whole events. An error inside becomes an error event, and no
    [DONE] follows it."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncIterator[bytes], open_streams: Gauge) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._open_streams = open_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            writing = asyncio.ensure_future(self._write(send))
            gone = asyncio.ensure_future(client_left(receive))
            failed = asyncio.ensure_future(self._generation.failed.wait())
            self._open_streams.inc()
            try:
                await asyncio.wait((writing, gone, failed), return_when=asyncio.FIRST_COMPLETED)
                if failed.done() and not gone.done():
                    await asyncio.wait((writing, gone), timeout=_LAST_WORDS, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
            finally:
                self._open_streams.dec()
                await cancel_and_wait(writing, gone, failed)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except GatewayError as error:
            await send({"type": "http.response.body", "body": _error_event(error), "more_body": True})
        except Exception:
            log.exception("a stream failed")
            await send({"type": "http.response.body", "body": _error_event(UNEXPECTED), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _error_event(error: GatewayError) -> bytes:
    return b"data: " + envelope(error) + b"\n\n"
