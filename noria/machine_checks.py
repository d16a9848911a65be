"""What `noria doctor` looks at on this machine without a store or a model: settings, doors, files, limits.

Knows what the settings classes say; starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import ssl
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from noria.doctor import Finding, fail, ok, warn
from noria.engine.config import EngineConfig
from noria.engine.wire.settings import CONFIG_VARIABLE, nearest
from noria.gateway.config import GatewaySettings
from noria.options import BadSetting, build, variables
from noria.ports import listenable

FEWEST_FILES = 4096
LEAST_SPACE = 2**30  # bytes
LOCAL = ("127.0.0.1", "::1", "localhost")


def check_settings(given: Mapping[str, Any]) -> Iterator[Finding]:
    """Do the settings make sense, and is every variable one that somebody reads?"""
    sound = True
    for settings in (GatewaySettings, EngineConfig):
        try:
            build(settings, given)
        except BadSetting as error:
            sound = False
            yield fail("settings", str(error), "give a value that fits, or none: noria serve --help lists them")
    known = {CONFIG_VARIABLE, *variables(GatewaySettings), *variables(EngineConfig)}
    for name in sorted(os.environ):
        if name.startswith("NORIA_") and name.removesuffix("_FILE") not in known:
            sound = False
            yield warn("settings", f"nothing reads {name}{nearest(name, known)}", "correct or remove it")
    if sound:
        yield ok("settings", f"from {os.environ.get(CONFIG_VARIABLE) or 'the environment and defaults'}")


def check_door(settings: GatewaySettings, *, of_serve: bool = False) -> Iterator[Finding]:
    """May the gateway listen where it should, and who is let in? `of_serve`: it has a key in any case."""
    for (host, port), prefix in zip(settings.doors, ("", "metrics-"), strict=False):
        yield _listening(host, port, "https" if settings.tls_cert else "http", prefix)
    where = f"{settings.host}:{settings.port}"
    if not settings.api_keys and of_serve:
        yield ok("keys", "noria serve made one, or was given some")
    elif not settings.api_keys and settings.host not in LOCAL:
        yield fail(
            "keys",
            f"a gateway on {where} lets in everybody who reaches it",
            "give NORIA_API_KEY or NORIA_API_KEY_FILE (noria serve makes a key by itself)",
        )
    elif not settings.api_keys:
        yield ok("keys", "none, and only this machine is listened to")
    else:
        yield ok("keys", f"{len(settings.api_keys)} given")


def check_certificate(settings: GatewaySettings) -> Iterator[Finding]:
    """Can HTTPS be spoken with the files that are given?"""
    if not settings.tls_cert:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        yield fail(
            "certificate",
            f"{settings.tls_cert} with {settings.tls_key}: {error}",
            "give a readable PEM chain and the key that belongs to it: --tls-cert, --tls-key",
        )
    else:
        yield ok("certificate", f"{settings.tls_cert} and its key belong together")


def check_limits(folder: Path) -> Iterator[Finding]:
    """Open files, and room where state and caches are kept."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEWEST_FILES:
        yield warn(
            "open files",
            f"{soft} at most: each client takes one, and beyond that nobody is let in",
            "ulimit -n 65536; LimitNOFILE=65536 in a unit of systemd; ulimits in docker-compose.yml",
        )
    else:
        yield ok("open files", f"{soft} at most")
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(place, os.W_OK):
        yield warn(
            "state folder", f"{folder} cannot be written to", "choose another with --state-dir, or change its owner"
        )
        return
    free = shutil.disk_usage(place).free
    if free < LEAST_SPACE:
        yield warn("state folder", f"{free / 2**20:.0f} MiB are free at {place}", "free some, or use --state-dir")
    else:
        yield ok("state folder", f"{folder}: {free / 2**30:.0f} GiB free")


def _listening(host: str, port: int, scheme: str, prefix: str) -> Finding:
    where, check = f"{host}:{port}", f"{prefix.replace('-', ' ')}port"
    try:
        listenable(host, port)
    except OSError as error:
        if _is_ours(scheme, host, port):
            return ok(check, f"a gateway listens on {where}")
        return fail(
            check,
            f"{where} cannot be listened on: {(error.strerror or str(error)).lower()}",
            f"stop who has it (ss -ltnp 'sport = :{port}'), or choose with --{prefix}host and --{prefix}port",
        )
    return ok(check, f"{where} is free")


def _is_ours(scheme: str, host: str, port: int) -> bool:
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    with (
        contextlib.suppress(OSError, ValueError),
        urllib.request.urlopen(
            f"{scheme}://{host}:{port}/healthz", timeout=2, context=ssl._create_unverified_context()
        ) as answer,
    ):
        return bool(answer.read(64) == b'{"status":"ok"}')
    return False
