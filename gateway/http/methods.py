"""HEAD and OPTIONS, answered for every route alike, as RFC 9110 sections 9.3.2 and 9.3.7 have them.

An ASGI layer around the app. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ASKED = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Methods:
    """HEAD is a GET whose body is left out; OPTIONS tells what a path can do. A browser's preflight never comes here:
    where origins are allowed the CORS layer outside this one has answered it."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        allowed = self._allowed(scope)
        if scope["method"] == "OPTIONS" and allowed:
            allow = ", ".join(sorted({*allowed, "OPTIONS"})).encode()
            await send({"type": "http.response.start", "status": 204, "headers": [(b"allow", allow)]})
            await send({"type": "http.response.body", "body": b""})
            return None
        if scope["method"] == "HEAD" and "GET" in allowed:
            return await self._app({**scope, "method": "GET"}, receive, _without_body(send))
        return await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> set[str]:
        """What the path can do, asked of the routes as the router asks them."""
        allowed = {method for method in _ASKED if self._is_routed({**scope, "method": method})}
        return allowed | {"HEAD"} if "GET" in allowed else allowed

    def _is_routed(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head
