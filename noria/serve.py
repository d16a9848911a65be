"""`noria serve`: checks what can be checked, then runs store, engine and gateway as children until told to stop.

Knows the three roles and how they find each other; not how any of them works.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from noria.banner import LogLines, Terminal, open_screen, ready_text
from noria.child import ChildSpec
from noria.embedded_store import EmbeddedStore, StoreError, default_state_dir, open_store
from noria.engine.config import EngineConfig
from noria.engine.models.errors import ModelError
from noria.engine.models.source import resolve
from noria.engine.wire import logs
from noria.gateway.config import GatewaySettings
from noria.kept_settings import keep
from noria.options import as_arguments, build, in_environment
from noria.ports import listenable
from noria.store_address import KEY_FILE, PEPPER_FILE
from noria.supervisor import EXIT_CONFIGURATION, EXIT_FAILED, Supervisor

ENGINE_MARGIN = 15.0  # on top of the engine's own time to drain: to end an iteration and hand its requests back
STORE_STOP_SECONDS = 10.0  # to write its file
GATEWAY_MARGIN = 15.0  # on top of the gateway's own time for open answers: last words, also to a store that hangs
PROBE_INTERVAL = 0.2
REMIND_INTERVAL = 30.0


class CannotStart(Exception):
    """Why nothing was started: one line for a person, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def serve(given: Mapping[str, Any], state_dir: Path | None) -> int:
    """Run until a signal. `given` are the options of the command line, by field name of either settings class.

    Returns the exit code. Raises CannotStart, and BadSetting for a value that does not fit.
    """
    engine, gateway = build(EngineConfig, given), build(GatewaySettings, given)
    port = _free_port(gateway.host, gateway.port)
    try:
        model = (engine.served_names or (resolve(engine.model).name,))[0]
    except ModelError as error:
        raise CannotStart(str(error), EXIT_CONFIGURATION) from None
    folder = (state_dir or default_state_dir()).expanduser().absolute()
    key, key_file = (None, folder) if gateway.api_keys else _kept_key(folder)
    pepper = gateway.key_pepper.get_secret_value() or _kept_pepper(folder)
    given_url = "redis_url" in given or in_environment(EngineConfig, "redis_url")
    if given_url:
        _check_store(engine.redis_url)
        store = None
    else:
        store = _open_store(folder)
        keep(folder, engine, gateway.model_copy(update={"port": port}))

    address = _Address(gateway.host, port, is_tls=bool(gateway.tls_cert))
    screen = open_screen(model)
    log_format: Literal["auto", "text", "json"] = gateway.log_format
    if isinstance(screen, Terminal):
        given = {**given, "log_format": "text" if log_format == "auto" else log_format}
    else:
        logs.configure("serve", log_format, gateway.log_level)
    specs = _specs(
        {**given, "port": port, "model": engine.model},
        screen,
        store,
        redis_url=store.url if store else engine.redis_url,
        api_key=key or gateway.api_key.get_secret_value(),
        key_pepper=pepper,
        engine_stop_seconds=engine.drain_timeout + ENGINE_MARGIN,
        gateway_stop_seconds=gateway.shutdown_timeout + GATEWAY_MARGIN,
    )
    announce = _Announcement(address, gateway.api_keys[0] if key is None else key, screen.say)

    def text(served: str | None) -> str:
        command = "noria keys bootstrap" + (f" --state-dir {state_dir}" if state_dir is not None else "")
        # Here and below: the store's client takes most of a second to load, which the children need not wait for.
        from noria.first_contact import first_admin_key

        admin = first_admin_key(store.url if store else engine.redis_url, pepper, command)
        return ready_text(address.base_url, served or model, key, str(key_file), admin)

    announce.text = text

    def tick() -> None:
        screen.tick()
        announce.tick()

    def stopping() -> None:
        screen.say("stopping (a second Ctrl-C ends everything at once)")

    screen.say(f"starting {model}")
    try:
        # On a terminal, SIGHUP says that it was closed.
        hangup_reloads = not sys.stdin.isatty()
        return Supervisor(specs, say=screen.say, on_tick=tick, on_stop=stopping, hangup_reloads=hangup_reloads).run()
    finally:
        screen.close()


def _specs(
    given: Mapping[str, Any],
    screen: Terminal | LogLines,
    store: EmbeddedStore | None,
    *,
    redis_url: str,
    api_key: str,
    key_pepper: str,
    engine_stop_seconds: float,
    gateway_stop_seconds: float,
) -> list[ChildSpec]:
    # Addresses and keys go through the environment: arguments can be read by every user of the machine.
    own = ("NORIA_API_KEY", "NORIA_KEY_PEPPER", "NORIA_PROGRESS_FD")
    shared = {name: value for name, value in os.environ.items() if name not in own}
    shared |= {"NORIA_REDIS_URL": redis_url, "PYTHONUNBUFFERED": "1"}
    noria = [sys.executable, "-m", "noria"]
    engine_options = {name: value for name, value in given.items() if name != "model"}

    def lines_of(name: str) -> Callable[[str], None] | None:
        return (lambda line: screen.show(name, line)) if isinstance(screen, Terminal) else None

    specs = []
    if store is not None:
        specs.append(
            ChildSpec(
                name="store",
                argv=store.argv,
                env={name: value for name, value in shared.items() if not name.startswith("NORIA_")},
                stop_seconds=STORE_STOP_SECONDS,
                ready=store.answers,
                last_words=store.last_log_line,
                orphan_signal=signal.SIGTERM,  # so that it writes its file
                inherit_fds=(store.lock_fd,),
                on_error_line=lines_of("store"),
            )
        )
    specs.append(
        ChildSpec(
            name="engine",
            argv=[*noria, "engine", *as_arguments(EngineConfig, engine_options), str(given["model"])],
            env=shared,
            stop_seconds=engine_stop_seconds,
            on_progress=screen.progress if isinstance(screen, Terminal) else None,
            on_error_line=lines_of("engine"),
        )
    )
    specs.append(
        ChildSpec(
            name="gateway",
            argv=[*noria, "gateway", *as_arguments(GatewaySettings, given)],
            env={**shared, "NORIA_API_KEY": api_key, "NORIA_KEY_PEPPER": key_pepper},
            stop_seconds=gateway_stop_seconds,
            reloads=True,
            on_error_line=lines_of("gateway"),
        )
    )
    return specs


class _Address:
    """Where the gateway listens, as a client on this machine reaches it."""

    def __init__(self, host: str, port: int, *, is_tls: bool = False) -> None:
        # An address that means "all of mine" can be listened on, not called.
        self.host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.port = port
        self._is_tls = is_tls
        self.base_url = f"http{'s' if is_tls else ''}://{f'[{self.host}]' if ':' in self.host else self.host}:{port}/v1"

    def get(self, path: str, key: str = "") -> tuple[int, bytes]:
        """Status and body; status 0 while nobody answers."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=2)
        if self._is_tls:  # our own child, whose certificate is made out to the name that clients use
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=2, context=context)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()


class _Announcement:
    """Asks the gateway whether it is ready, until it is; then prints the text, once."""

    def __init__(self, address: _Address, key: str, say: Callable[[str], None]) -> None:
        self._address = address
        self._key = key
        self._say = say
        self._done = False
        self._probe_at = 0.0
        self._remind_at = time.monotonic() + REMIND_INTERVAL
        self.text: Callable[[str | None], str] = lambda served: ""

    def tick(self) -> None:
        now = time.monotonic()
        if self._done or now < self._probe_at:
            return
        self._probe_at = now + PROBE_INTERVAL
        status, body = self._address.get("/readyz")
        if status == 200:
            self._done = True
            print(self.text(self._served()), flush=True)
        elif now >= self._remind_at:
            self._remind_at = now + REMIND_INTERVAL
            self._say(f"not ready yet: {_reason(body) if status else 'the gateway does not answer'}")

    def _served(self) -> str | None:
        """The model's name as the API gives it."""
        try:
            return str(json.loads(self._address.get("/v1/models", self._key)[1])["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            return None


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:200]


def _free_port(host: str, port: int) -> int:
    """The port itself if it can be listened on; for 0 one that can."""
    try:
        return listenable(host, port)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CannotStart(
            f"Cannot listen on {host}:{port}: {reason}; choose with --host and --port", EXIT_FAILED
        ) from None


def _kept_key(folder: Path) -> tuple[str, Path]:
    """The generated key of this state folder, the same at every start."""
    return _kept(folder, KEY_FILE, lambda: f"sk-noria-{secrets.token_urlsafe(24)}")


def _kept_pepper(folder: Path) -> str:
    """What the digests of stored keys are made with."""
    return _kept(folder, PEPPER_FILE, lambda: secrets.token_urlsafe(48))[0]


def _kept(folder: Path, name: str, make: Callable[[], str]) -> tuple[str, Path]:
    """A secret of the state folder that is made once."""
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists() and (kept := path.read_text().strip()):
            return kept, path
        made = make()
        fresh = folder / f"{name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(made + "\n")
        fresh.replace(path)
    except OSError as error:
        raise CannotStart(f"The state folder {folder} cannot be used: {error.strerror}", EXIT_FAILED) from None
    return made, path


def _open_store(folder: Path) -> EmbeddedStore:
    try:
        return open_store(folder)
    except StoreError as error:
        raise CannotStart(str(error), EXIT_FAILED) from None


def _check_store(url: str) -> None:
    """Raises CannotStart unless a store answers at `url`."""
    from noria.first_contact import StoreAway, check_store

    try:
        check_store(url)
    except ValueError as error:
        raise CannotStart(f"--redis-url: {error}", EXIT_CONFIGURATION) from None
    except StoreAway as error:
        raise CannotStart(f"Redis cannot be reached at {error}", EXIT_FAILED) from None
