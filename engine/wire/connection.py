"""Clients of the store, set up so that nothing hangs or repeats by itself, and pipelines that survive lost scripts.

Knows Redis and nothing of what the scripts mean.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.retry import Retry

COMMAND_TIMEOUT = 5.0
"""Seconds for one reply. A blocking read has its own client with this much on top of its block time."""

CONNECT_TIMEOUT = 2.0
MAX_CONNECTIONS = 32
MAX_BLOCK = 1.0
"""Seconds that a blocking read may block: after that it looks up, so that a closed connection is noticed."""

LUA = Path(__file__).parent / "lua"

Command = Sequence[Any]


class BrokerUnavailable(Exception):
    """The store is away, loading, read-only or too slow. The message names its URL (password hidden) and the cause."""


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


def _load(name: str, *, prelude: str | None = "prelude") -> Script:
    text = (LUA / f"{name}.lua").read_text()
    if prelude is not None:
        text = (LUA / f"{prelude}.lua").read_text() + text
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


ENQUEUE = _load("enqueue")
CLAIM = _load("claim")
PROGRESS = _load("progress")
CANCEL = _load("cancel")
RELEASE = _load("release")
LEASE = _load("lease")
SNAPSHOT = _load("snapshot")
POSITION = _load("position")
REGISTER = _load("pools", prelude=None)
LOG = _load("log", prelude=None)
RECORD_PUT = _load("record_put", prelude="records_prelude")
RECORD_DROP = _load("record_drop", prelude="records_prelude")
RECORD_TOUCH = _load("record_touch", prelude="records_prelude")
RECORD_CHUNK = _load("record_chunk", prelude="records_prelude")
RECORD_PAGE = _load("record_page", prelude="records_prelude")
BATCH_LEASE = _load("batch_lease", prelude=None)
BATCH_LINE = _load("batch_line", prelude="records_prelude")
_BATCHES = (BATCH_LEASE, BATCH_LINE)
_RECORDS = (RECORD_PUT, RECORD_DROP, RECORD_TOUCH, RECORD_CHUNK, RECORD_PAGE)
SCRIPTS = (ENQUEUE, CLAIM, PROGRESS, CANCEL, RELEASE, LEASE, SNAPSHOT, POSITION, REGISTER, LOG, *_RECORDS, *_BATCHES)
_TEXT_BY_SHA = {s.sha: s.text for s in SCRIPTS}


@contextmanager
def _outages_named(url: str) -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:  # builtin TimeoutError, which has no text, is an OSError
        raise BrokerUnavailable(f"{redact(url)}: {str(error) or 'no answer in time'}") from error


def _client_options(block: float, repeats: int) -> dict[str, Any]:
    return {
        "protocol": 2,  # reply shapes differ between protocols, and 3 adds push messages that nobody here reads
        "decode_responses": False,
        "socket_timeout": COMMAND_TIMEOUT + block,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "retry": Retry(NoBackoff(), repeats, supported_errors=(RedisConnectionError,)),
    }


def _failed(reply: Any) -> bool:
    return isinstance(reply, ResponseError)


class Store:
    """The synchronous client. One thread at a time; commands are never repeated behind the caller's back."""

    def __init__(self, url: str, *, block: float = 0.0) -> None:
        self.url = url
        self._client: Any = redis.Redis.from_url(url, **_client_options(block, repeats=0))

    def run(self, *commands: Command) -> list[Any]:
        """One pipelined round trip without MULTI; replies in order. Raises BrokerUnavailable.

        The server forgets scripts when it restarts: those commands are run again with their text, in order.
        """
        with _outages_named(self.url):
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
            for i, reply in enumerate(replies):
                if isinstance(reply, NoScriptError):
                    replies[i] = self._client.execute_command(*_with_text(commands[i]))
                elif _failed(reply):
                    raise reply
        return replies

    def close(self) -> None:
        """Drop all connections."""
        self._client.close()


class AsyncStore:
    """The asyncio client. Commands are repeated once over a fresh connection, so all of them are idempotent."""

    def __init__(self, url: str, *, block: float = 0.0) -> None:
        self.url = url
        self._timeout = COMMAND_TIMEOUT + block
        # The client's own timeout goes through asyncio.wait_for, which in Python 3.11 swallows a cancellation that
        # comes as the write ends; the task then lives on uncancelled. `run` keeps the time instead.
        options = _client_options(block, repeats=1) | {"socket_timeout": None}
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, max_connections=MAX_CONNECTIONS, timeout=COMMAND_TIMEOUT, **options
        )
        self._client: Any = redis.asyncio.Redis.from_pool(pool)

    async def run(self, *commands: Command) -> list[Any]:
        """As `Store.run`."""
        with _outages_named(self.url):
            async with asyncio.timeout(self._timeout):
                pipeline = self._client.pipeline(transaction=False)
                for command in commands:
                    pipeline.execute_command(*command)
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
                for i, reply in enumerate(replies):
                    if isinstance(reply, NoScriptError):
                        replies[i] = await self._client.execute_command(*_with_text(commands[i]))
                    elif _failed(reply):
                        raise reply
        return replies

    async def close(self) -> None:
        """Drop all connections."""
        await self._client.aclose()


def _with_text(command: Command) -> Command:
    return ("EVAL", _TEXT_BY_SHA[command[1]], *command[2:])
