"""Where the store of this machine is, for commands that look at it or change it: as told, or that of a `noria serve`.

Knows addresses and files; nothing of what the store holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from noria.embedded_store import StoreError, default_state_dir, running_store
from noria.engine.config import EngineConfig
from noria.gateway.config import GatewaySettings
from noria.gateway.tenancy.credentials import MIN_PEPPER
from noria.options import build, in_environment
from noria.supervisor import EXIT_CONFIGURATION, EXIT_FAILED

if TYPE_CHECKING:  # the store's client takes most of a second to load
    from noria.engine.wire.broker import BrokerUnavailable

KEY_FILE = "api-key"
PEPPER_FILE = "key-pepper"


class CannotShow(Exception):
    """Why nothing can be shown or done: one line for a person, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def unreachable(error: BrokerUnavailable) -> CannotShow:
    """The store does not answer."""
    reason = " ".join(str(error).split()).rstrip(".")
    which = "say which with --redis-url, or with the --state-dir of its noria serve"
    return CannotShow(f"the store cannot be reached at {reason}; {which}", EXIT_FAILED)


def store_url(redis_url: str | None, state_dir: Path | None) -> str:
    """The one given, else the environment's, else the store of a `noria serve` that runs here, else the default."""
    if redis_url is not None:
        return build(EngineConfig, {"redis_url": redis_url}).redis_url
    if state_dir is not None or not in_environment(EngineConfig, "redis_url"):
        try:
            found = running_store(_folder(state_dir))
        except (StoreError, OSError):
            found = None
        if found is not None:
            return found
        if state_dir is not None:
            raise CannotShow(f"no store runs in the state folder {state_dir}", EXIT_FAILED)
    return build(EngineConfig, {}).redis_url


def key_pepper(state_dir: Path | None) -> str:
    """The environment's, else the one that a `noria serve` keeps in the state folder. Raises CannotShow."""
    given = build(GatewaySettings, {}).key_pepper.get_secret_value()
    if given:
        return given
    path = _folder(state_dir) / PEPPER_FILE
    try:
        kept = path.read_text().strip()
    except OSError:
        kept = ""
    if len(kept) < MIN_PEPPER:
        message = "no key pepper: set NORIA_KEY_PEPPER, or NORIA_KEY_PEPPER_FILE to a file that holds it"
        where = f"or start noria serve once, which keeps one in {path} (--state-dir names another folder)"
        raise CannotShow(f"{message}, {where}", EXIT_CONFIGURATION)
    return kept


def kept_api_key(state_dir: Path | None) -> str:
    """The key that a `noria serve` made and keeps in the state folder; empty where there is none."""
    try:
        return (_folder(state_dir) / KEY_FILE).read_text().strip()
    except OSError:
        return ""


def _folder(state_dir: Path | None) -> Path:
    return (state_dir or default_state_dir()).expanduser().absolute()
