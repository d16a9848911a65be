"""The gateway process: listens, serves the app until told to stop, and lets open answers end first.

Knows no route.
"""

from __future__ import annotations

import gc
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType

import structlog
import uvicorn

from noria.engine.wire.broker import redact
from noria.engine.wire.logs import configure
from noria.engine.wire.tracing import CannotTrace
from noria.gateway.app import create_app
from noria.gateway.config import GatewaySettings
from noria.gateway.http.protocol import bounded
from noria.gateway.reload import reload
from noria.gateway.services import Services

log = structlog.get_logger(__name__)

_BACKLOG = 2048
_LAST_WORDS = 3
"""Seconds for the answers that were cut off to tell their clients."""

_EXIT_TEMPORARY = 1
_EXIT_CONFIGURATION = 2


class DrainingServer(uvicorn.Server):
    """Uvicorn, which on a signal would stop listening at once: this one goes on listening to say that it is not ready
    and takes nothing new, until open answers have ended or their time is up. A second signal ends it right away."""

    def __init__(self, config: uvicorn.Config, services: Services, reload: Callable[[], None]) -> None:
        super().__init__(config)
        self._services = services
        self._reload = reload
        self._reload_asked = False
        self._until = 0.0  # monotonic

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        """SIGHUP: the settings are read again between two ticks, not in the middle of whatever runs now."""
        self._reload_asked = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._services.drain.begun:
            self.should_exit = True
            return
        self._services.drain.begun = True
        self._until = time.monotonic() + self._services.settings.shutdown_timeout

    async def on_tick(self, counter: int) -> bool:
        if self._reload_asked:
            self._reload_asked = False
            self._reload()
        drain = self._services.drain
        if drain.begun and (not drain.open or time.monotonic() >= self._until):
            self.should_exit = True
        if self.should_exit:
            if drain.open:
                log.warning("open answers are cut off", count=drain.open)
            for sink in list(self._services.pump.sinks()):
                sink.cut_off()
        return await super().on_tick(counter)


def run(settings: GatewaySettings, read_again: Callable[[], GatewaySettings] = GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT; on SIGHUP take over what `read_again` returns. Returns the exit code. Where it
    cannot start, one line on stderr says why: then the code is 1 for an address that is taken, and 2 for settings that
    will be as wrong at the next try."""
    configure("gateway", settings.log_format, settings.log_level)
    try:
        tls = _tls(settings)
        app = create_app(settings)
        listeners = [_listen(host, port) for host, port in settings.doors]
    except (_BadCertificate, CannotTrace) as error:
        return _refuse(str(error), _EXIT_CONFIGURATION)
    except ValueError as error:
        return _refuse(f"{redact(settings.redis_url)} is not the URL of a store: {error}", _EXIT_CONFIGURATION)
    except _CannotListen as error:
        return _refuse(str(error), _EXIT_TEMPORARY)
    if not settings.api_keys:
        log.warning("no API key is set: every caller is let in")
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=bounded(settings.max_head_bytes, settings.head_timeout),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive,
        timeout_graceful_shutdown=_LAST_WORDS,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    log.info("listening", host=settings.host, port=listeners[0].getsockname()[1])
    live = app.state.services.live
    live.watch(lambda now: configure("gateway", now.log_format, now.log_level))
    server = DrainingServer(config, app.state.services, partial(reload, live, partial(_read, read_again, tls)))
    signal.signal(signal.SIGHUP, server.handle_hangup)
    # Before and after uvicorn's own time, too, a signal is a wish to end and not a death.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    gc.collect()
    gc.freeze()  # what is there now stays: no collection looks at it again
    with ExitStack() as open_doors:
        server.run(sockets=[open_doors.enter_context(listener) for listener in listeners])
    return 0


class _BadCertificate(ValueError):
    """Which file, and what is wrong with it."""


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """What HTTPS is spoken with; None: HTTP is."""
    if not settings.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # ssl's own errors among them
        raise _BadCertificate(f"cannot speak HTTPS with {settings.tls_cert}, {settings.tls_key}: {error}") from None
    return context


def _read(read_again: Callable[[], GatewaySettings], tls: ssl.SSLContext | None) -> GatewaySettings:
    """The settings read again; new connections get the certificate that lies in the files now."""
    settings = read_again()
    if tls is not None and _tls(settings) is not None:  # tried apart: a bad pair must not spoil the context in use
        tls.load_cert_chain(settings.tls_cert, settings.tls_key)
    return settings


def _refuse(reason: str, code: int) -> int:
    print(f"noria gateway: {reason}", file=sys.stderr, flush=True)
    return code


class _CannotListen(Exception):
    """On which address, and why."""


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises _CannotListen where the address is taken or unknown."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise _CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
