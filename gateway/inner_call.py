"""Calls an endpoint of this very gateway from inside: the whole application but no socket and no key.

Knows ASGI; knows no endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

TENANT = "noria.tenant"
"""Where the scope of an inner call has whose call it is. A scope is made by the server: no client can set this."""

_LAST_WORDS = 5.0
"""Seconds for an endpoint to let go once its caller has left."""

Message = MutableMapping[str, Any]
App = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class InnerCall:
    """One POST. A caller that is cancelled leaves as a client that hangs up: with an Idempotency-Key the answer goes on
    for a while, and the next call with the key gets it."""

    def __init__(self, path: str, body: bytes, headers: Mapping[str, str], tenant: object) -> None:
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *((name.encode(), value.encode()) for name, value in headers.items()),
            ],
            "client": None,
            "server": None,
            TENANT: tenant,
        }
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    async def run(self, app: App) -> Reply:
        answering = asyncio.ensure_future(_run(app, self))
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            self._left.set()
            await asyncio.wait((answering,), timeout=_LAST_WORDS)
            answering.cancel()
            raise
        return Reply(self._status, self._headers, b"".join(self._parts))

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self._parts.append(message.get("body", b""))

    @property
    def scope(self) -> Mapping[str, Any]:
        return self._scope


async def _run(app: App, call: InnerCall) -> None:
    await app(call.scope, call.receive, call.send)
