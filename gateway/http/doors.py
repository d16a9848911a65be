"""Two doors to one gateway: figures for whoever watches it behind a port of their own, the API behind the other.

Knows addresses and ports; no page's content.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from noria.gateway.errors import UnknownAddress
from noria.gateway.http.error_answers import respond

FIGURES = "/metrics"
_PROBES = frozenset(("/health", "/healthz", "/readyz"))


class Doors:
    """Wraps the app. Behind `metrics_port` are figures and probes and nothing else; elsewhere are no figures."""

    def __init__(self, app: ASGIApp, metrics_port: int) -> None:
        self._app = app
        self._metrics_port = metrics_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_here(scope["path"], scope["server"]):
            return await self._app(scope, receive, send)
        unknown = UnknownAddress(f"Unknown request URL: {scope['method']} {scope['path'][:200]}.")
        await respond(unknown, scope)(scope, receive, send)

    def _is_here(self, path: str, server: tuple[str, int] | None) -> bool:
        if server is not None and server[1] == self._metrics_port:
            return path == FIGURES or path in _PROBES
        return path != FIGURES
