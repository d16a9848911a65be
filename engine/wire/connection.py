"""Clients of the store, set up so that nothing hangs or repeats by itself, and pipelines that survive lost scripts.

Knows Redis and nothing of what the scripts mean.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, NoScriptError, RedisError, ResponseError
from redis.retry import Retry

from noria.engine.wire.async_links import open_async_link
from noria.engine.wire.links import open_link
from noria.engine.wire.slots import Command

COMMAND_TIMEOUT = 5.0
"""Seconds for one reply. A blocking read has its own client with this much on top of its block time."""

CONNECT_TIMEOUT = 2.0
MAX_BLOCK = 1.0
"""Seconds that a blocking read may block: after that it looks up, so that a closed connection is noticed."""

LUA = Path(__file__).parent / "lua"


class BrokerUnavailable(Exception):
    """The store is away, loading, full, read-only or too slow. The message names its URL (password hidden) and the
    cause. Trying again may help."""


class StoreFault(Exception):
    """A command was refused for a reason that does not pass: a script of ours failed, or a key holds what is not ours.
    The message is as that of `BrokerUnavailable`. Trying again does not help."""


_STATES = frozenset({"BUSY", "MISCONF", "NOREPLICAS", "OOM", "READONLY"})
"""Codes of errors that say what state the store is in, where the client library has no class for them or takes them for
others: those that a script passes on."""


def redact(url: str) -> str:
    """The URL without its password, fit for a log."""
    parts = urlsplit(url)
    netloc = parts.netloc
    if parts.password is not None:
        userinfo, _, host = netloc.rpartition("@")
        netloc = f"{userinfo.partition(':')[0]}:***@{host}"
    query = urlencode([(k, "***" if k == "password" else v) for k, v in parse_qsl(parts.query)], safe="*/")
    return urlunsplit((parts.scheme, netloc, parts.path, query, parts.fragment))


@dataclass(frozen=True)
class Script:
    """One Lua script: its text and the SHA-1 that the server knows it by."""

    text: str
    sha: str

    def __call__(self, key: str, *args: Any) -> Command:
        """The command that runs it on one pool (or on the register of pools)."""
        return ("EVALSHA", self.sha, 1, key, *args)


_TEXT_BY_SHA: dict[str, str] = {}


def load_script(folder: Path, *names: str) -> Script:
    """The script that these files make, one behind the other. `run` knows it from now on."""
    text = "".join((folder / f"{name}.lua").read_text() for name in names)
    script = Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    _TEXT_BY_SHA[script.sha] = text
    return script


ENQUEUE = load_script(LUA, "prelude", "enqueue")
CLAIM = load_script(LUA, "prelude", "claim")
PROGRESS = load_script(LUA, "prelude", "fold", "progress")
CANCEL = load_script(LUA, "prelude", "cancel")
RELEASE = load_script(LUA, "prelude", "fold", "release")
LEASE = load_script(LUA, "prelude", "lease")
SNAPSHOT = load_script(LUA, "prelude", "snapshot")
POSITION = load_script(LUA, "prelude", "position")
REGISTER = load_script(LUA, "pools")
LOG = load_script(LUA, "log")
WATCH = load_script(LUA, "watch")
RECORD_PUT = load_script(LUA, "records_prelude", "record_put")
RECORD_DROP = load_script(LUA, "records_prelude", "record_drop")
RECORD_TOUCH = load_script(LUA, "records_prelude", "record_touch")
RECORD_CHUNK = load_script(LUA, "records_prelude", "record_chunk")
RECORD_PAGE = load_script(LUA, "records_prelude", "record_page")
BATCH_LEASE = load_script(LUA, "batch_lease")
BATCH_LINE = load_script(LUA, "records_prelude", "batch_line")
_BATCHES = (BATCH_LEASE, BATCH_LINE)
_RECORDS = (RECORD_PUT, RECORD_DROP, RECORD_TOUCH, RECORD_CHUNK, RECORD_PAGE)
_POOLS = (ENQUEUE, CLAIM, PROGRESS, CANCEL, RELEASE, LEASE, SNAPSHOT, POSITION)
SCRIPTS = (*_POOLS, REGISTER, LOG, WATCH, *_RECORDS, *_BATCHES)


@contextmanager
def _errors_named(url: str) -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:  # builtin TimeoutError, which has no text, is an OSError
        kind = StoreFault if _is_fault(error) else BrokerUnavailable
        raise kind(f"{redact(url)}: {str(error) or 'no answer in time'}") from error


def _is_fault(error: Exception) -> bool:
    """The client library has classes of their own for most states of a store, and none for a script's error."""
    plain = type(error) is ResponseError and str(error).partition(" ")[0] not in _STATES
    return plain or isinstance(error, DataError)


def _client_options(block: float, repeats: int) -> dict[str, Any]:
    return {
        "protocol": 2,  # reply shapes differ between protocols, and 3 adds push messages that nobody here reads
        "decode_responses": False,
        "socket_timeout": COMMAND_TIMEOUT + block,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "retry": Retry(NoBackoff(), repeats, supported_errors=(RedisConnectionError,)),
    }


def _raise_first_error(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply


class Store:
    """The synchronous client. One thread at a time; commands are never repeated behind the caller's back."""

    def __init__(self, url: str, *, block: float = 0.0) -> None:
        self.url = url
        self._link = open_link(url, _client_options(block, repeats=0))

    def run(self, *commands: Command) -> list[Any]:
        """One pipelined round trip without MULTI; replies in order, as the store sent them. Raises BrokerUnavailable
        and StoreFault.

        The server forgets scripts when it restarts: those commands are run again with their text, in order.
        """
        with _errors_named(self.url):
            replies = self._link.round_trip(commands)
            for i, reply in enumerate(replies):
                if isinstance(reply, NoScriptError):
                    (replies[i],) = self._link.round_trip([_with_text(commands[i])])
            _raise_first_error(replies)
        return replies

    def close(self) -> None:
        """Drop the connection."""
        self._link.close()


class AsyncStore:
    """The asyncio client. Commands are repeated once over a fresh connection, so all of them are idempotent."""

    def __init__(self, url: str, *, block: float = 0.0) -> None:
        self.url = url
        self._timeout = COMMAND_TIMEOUT + block
        # The client's own timeout goes through asyncio.wait_for, which in Python 3.11 swallows a cancellation that
        # comes as the write ends; the task then lives on uncancelled. `run` keeps the time instead.
        options = _client_options(block, repeats=1) | {"socket_timeout": None}
        self._link = open_async_link(url, options, wait=COMMAND_TIMEOUT)

    async def run(self, *commands: Command) -> list[Any]:
        """As `Store.run`."""
        with _errors_named(self.url):
            async with asyncio.timeout(self._timeout):
                replies = await self._link.round_trip(commands)
                for i, reply in enumerate(replies):
                    if isinstance(reply, NoScriptError):
                        (replies[i],) = await self._link.round_trip([_with_text(commands[i])])
                _raise_first_error(replies)
        return replies

    async def messages(self, pattern: str, silence: float) -> AsyncIterator[bytes]:
        """What is published from now on on channels that match, until nothing has come for `silence` seconds: a
        connection that broke without a word looks the same, so call again. Raises BrokerUnavailable."""
        with _errors_named(self.url):
            async with asyncio.timeout(self._timeout):
                client = await self._link.subscriber()
            async with client.pubsub(ignore_subscribe_messages=True) as subscription:
                async with asyncio.timeout(self._timeout):
                    await subscription.psubscribe(pattern)
                heard = time.monotonic()
                while time.monotonic() - heard < silence:
                    message = await subscription.get_message(timeout=MAX_BLOCK)
                    if message is not None:
                        heard = time.monotonic()
                        yield message["data"]

    async def close(self) -> None:
        """Drop all connections."""
        await self._link.close()


def _with_text(command: Command) -> Command:
    return ("EVAL", _TEXT_BY_SHA[command[1]], *command[2:])
