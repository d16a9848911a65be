"""Which checks `noria doctor` makes here: those whose subject exists.

Knows where settings and stores are found; checks nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from noria.doctor import Check, Finding, ok
from noria.embedded_store import StoreError, default_state_dir, running_store
from noria.engine.config import EngineConfig
from noria.gateway.config import GatewaySettings
from noria.kept_settings import kept
from noria.machine_checks import check_certificate, check_door, check_limits, check_settings
from noria.options import BadSetting, build, in_environment
from noria.store_checks import check_store

EngineCheck = Callable[[EngineConfig], Iterable[Finding]]


def all_checks(given: Mapping[str, Any], state_dir: Path | None, engine: EngineCheck | None) -> list[Check]:
    """`given` are options; `engine` is None where no engine is installed. What cannot be read from bad settings is
    not checked: the settings are to be mended first."""
    folder = (state_dir or default_state_dir()).expanduser().absolute()
    checks: list[Check] = []
    serve_runs = _embedded(given, folder) is not None
    if serve_runs and (of_serve := kept(folder)):
        given = {**of_serve, **given}
        checks.append(partial(_of_serve, folder))
    checks += [partial(check_settings, given), partial(check_limits, folder)]
    try:
        gateway, config = build(GatewaySettings, given), build(EngineConfig, given)
    except BadSetting:
        return checks
    checks.append(partial(check_door, gateway, of_serve=serve_runs))
    checks += [partial(check_certificate, gateway), _store_check(given, config, folder)]
    checks.append(partial(engine, config) if engine is not None else _no_engine)
    return checks


def _store_check(given: Mapping[str, Any], config: EngineConfig, folder: Path) -> Check:
    running = _embedded(given, folder)
    if running is not None:
        return partial(check_store, running)
    elsewhere = "redis_url" in given or in_environment(EngineConfig, "redis_url")
    return partial(check_store, config.redis_url) if elsewhere else _no_store


def _embedded(given: Mapping[str, Any], folder: Path) -> str | None:
    """The address of the store of a noria serve that runs with this state folder, unless another store is given."""
    if "redis_url" in given or in_environment(EngineConfig, "redis_url"):
        return None
    try:
        return running_store(folder)
    except (StoreError, OSError):
        return None


def _of_serve(folder: Path) -> Iterator[Finding]:
    yield ok("noria serve", f"one runs with {folder}: it is looked at as it was started")


def _no_store() -> Iterator[Finding]:
    yield ok("store", "none is given and no noria serve runs here: it would bring its own")


def _no_engine() -> Iterator[Finding]:
    yield ok("engine", "not installed here: model, kernels and GPU were not looked at")
