"""Uvicorn's fast HTTP protocol with what it lacks: bounds on the size of a request's head and on the time it may take,
and a way to write to a stream without a coroutine.

Knows HTTP/1.1 and no application.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from noria.gateway.errors import InvalidRequest, envelope

PUSH = "noria.push"
"""ASGI extension: a function that writes a piece of a body whose head is out, and returns True; or writes nothing and
returns False: the connection takes no more at the moment, or the body is not one of chunks."""


class BoundedHttp(HttpToolsProtocol):
    """The limits are set once per process, by `bounded`: uvicorn makes the instances itself."""

    max_head_bytes: ClassVar[int]
    head_timeout: ClassVar[float]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_head = True
        self._head_bytes = 0  # read so far of a head that is not complete
        self._field_bytes = 0  # in the fields that the parser has found in it
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse_head()

    def on_url(self, url: bytes) -> None:
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_field(len(name) + len(value) + 4)  # ": " and the line's end
        super().on_header(name, value)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {PUSH: partial(_push, self.cycle)}  # type: ignore[dict-item]

    def send_400_response(self, msg: str) -> None:
        """In the API's own shape, like every other error."""
        if self._field_bytes > self.max_head_bytes:  # `_count_field` has stopped the parser
            self._refuse_head()
        else:
            self._refuse(400, "Bad Request", msg)

    def _count_field(self, size: int) -> None:
        """A head that comes in one piece is over before its size is known any other way."""
        self._field_bytes += size
        if self._field_bytes > self.max_head_bytes:
            raise ValueError("the request's head is too large")

    def _refuse_head(self) -> None:
        self._refuse(431, "Request Header Fields Too Large", "The request's headers are too large.")

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes, self._field_bytes = True, 0, 0
        self._head_timer = self.loop.call_later(self.head_timeout, self._head_too_slow)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        body = envelope(InvalidRequest(message))
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _push(cycle: RequestResponseCycle, data: bytes) -> bool:
    """What `cycle.send` would do, less four layers of coroutines above it: a fifth of what a token costs."""
    if cycle.disconnected:
        return True
    if cycle.flow.write_paused or not cycle.response_started or cycle.response_complete or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def _without_upgrade(data: bytes) -> bytes:
    """Drop an offer to switch protocols, as RFC 9110 allows: the parser would take the body for the new protocol's.
    Java's client offers HTTP/2 with every first request."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    return _UPGRADE.sub(b"", head) + data[len(head) :] if b"pgrade" in head or b"PGRADE" in head else data


_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


def bounded(max_head_bytes: int, head_timeout: float) -> type[BoundedHttp]:
    """The protocol class with these limits."""
    return type("BoundedHttp", (BoundedHttp,), {"max_head_bytes": max_head_bytes, "head_timeout": head_timeout})
