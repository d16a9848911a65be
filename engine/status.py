"""The engine's own pages for whoever watches it: /livez, /readyz and /metrics, served by threads beside the loop.

Knows how a loop's health is told; computes nothing and is no way in for requests.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from noria.engine.engine import Engine
from noria.engine.wire.exposition import CONTENT_TYPE, Page, engine_families
from noria.version import __version__

_PATIENCE = 5.0
"""Seconds for a client to send its request."""


class StatusPages:
    """Listens from the start, while the model loads: alive, not ready. `watch` gives it the engine once there is one.

    Raises OSError where the address cannot be had.
    """

    def __init__(self, host: str, port: int, stuck_after: float, *, vllm_names: bool = False) -> None:
        self._stuck_after = stuck_after
        self._engine: Engine | None = None
        self._names = ("", "")
        self._page = Page("engine", __version__, vllm_names=vllm_names)
        self._page.registry.register(_Figures(self))
        pages = self

        class Handler(_Handler):
            status = pages

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="status-pages", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def watch(self, engine: Engine, model: str, engine_id: str) -> None:
        self._engine, self._names = engine, (model, engine_id)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def livez(self) -> tuple[HTTPStatus, dict[str, object]]:
        """The heartbeat of the loop: 503 once it has not turned for `stuck_after` seconds. An iteration that is merely
        long, and a model that loads, are alive."""
        if self._engine is None:
            return HTTPStatus.OK, {"status": "loading"}
        silence = round(time.monotonic() - self._engine.last_turn, 3)
        if silence > self._stuck_after:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "stuck", "seconds_since_last_turn": silence}
        return HTTPStatus.OK, {"status": "alive", "seconds_since_last_turn": silence}

    def readyz(self) -> tuple[HTTPStatus, dict[str, object]]:
        """200 while it claims requests: loaded, not stuck, not draining, the store within reach."""
        status, body = self.livez()
        engine = self._engine
        if engine is None or status is not HTTPStatus.OK:
            return HTTPStatus.SERVICE_UNAVAILABLE, body
        if engine.statistics.draining:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "draining", "requests": engine.num_held}
        if engine.is_cut_off:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "the store does not answer"}
        return HTTPStatus.OK, {"status": "ready", "model": self._names[0], "engine": self._names[1]}

    def metrics(self) -> bytes:
        """The text exposition format."""
        return self._page.render()

    def families(self) -> Iterator[Metric]:
        if self._engine is not None:
            model, engine_id = self._names
            yield from engine_families([(model, {engine_id: self._engine.statistics.latest})])


class _Figures(Collector):
    def __init__(self, pages: StatusPages) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        return self._pages.families()


class _Handler(BaseHTTPRequestHandler):
    status: StatusPages
    timeout = _PATIENCE
    server_version, sys_version = "noria", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(HTTPStatus.OK, self.status.metrics(), CONTENT_TYPE)
        elif path in ("/livez", "/readyz"):
            status, body = self.status.livez() if path == "/livez" else self.status.readyz()
            self._answer(status, json.dumps(body).encode(), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"/livez, /readyz, /metrics\n", "text/plain")

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Probes are no news."""
