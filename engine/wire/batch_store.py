"""What the store knows of batches that run: which there are, who runs each, and the one result of every line.

A batch's own record is a record like others (`record_store`). Knows no line's meaning and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from noria.engine.wire import keys
from noria.engine.wire.connection import BATCH_LEASE, BATCH_LINE, AsyncStore

_LIFE_MS = 8 * 86_400_000
"""What is known of a running batch lives longer than any batch may run."""


class LeaseLost(Exception):
    """Another runner has the batch: whatever this one still does for it counts no more."""


@dataclass(frozen=True, slots=True)
class BatchKey:
    tenant: str
    id: str


class BatchStore:
    """All methods raise BrokerUnavailable and may be repeated."""

    def __init__(self, redis_url: str) -> None:
        self._store = AsyncStore(redis_url)

    async def close(self) -> None:
        await self._store.close()

    async def open(self, batch: BatchKey) -> None:
        """From now on runners see it."""
        await self._store.run(("HSETNX", keys.BATCHES, keys.batch_member(batch.tenant, batch.id), time.time()))

    async def shut(self, batch: BatchKey) -> None:
        """It is over: runners see it no more, and nothing but its record is kept."""
        parts = [keys.batch(batch.tenant, batch.id, part) for part in ("done", "counts")]
        await self._store.run(("DEL", *parts), ("HDEL", keys.BATCHES, keys.batch_member(batch.tenant, batch.id)))

    async def running(self) -> dict[BatchKey, float]:
        """Every batch that is not over, and when (Unix seconds) it was opened."""
        (reply,) = await self._store.run(("HGETALL", keys.BATCHES))
        found = {}
        for member, opened in _pairs(reply).items():
            batch_id, _, tenant = member.decode().partition("/")
            found[BatchKey(tenant, batch_id)] = float(opened)
        return found

    async def lease(self, batch: BatchKey, runner: str, seconds: float) -> bool:
        """Take or renew the lease; False: another runner has it."""
        (reply,) = await self._store.run(BATCH_LEASE(_key(batch, "lease"), runner, max(1, int(seconds * 1000))))
        return bool(reply)

    async def release(self, batch: BatchKey, runner: str) -> None:
        """Give the lease back, if it is ours."""
        await self._store.run(BATCH_LEASE(_key(batch, "lease"), runner, 0))

    async def keep_result(
        self, batch: BatchKey, runner: str, line: int, file_id: str, result: bytes, counts: Mapping[str, int]
    ) -> bool:
        """Append the result of a line to a file (a record of kind `file`), unless the line has one already; whether it
        was appended. `counts` are added up. Raises `LeaseLost`, and KeyError where there is no such file."""
        added = [item for pair in counts.items() for item in pair]
        prefix = keys.batch(batch.tenant, batch.id, "")
        files = keys.records(batch.tenant, "file")
        (reply,) = await self._store.run(BATCH_LINE(files, "", file_id, prefix, runner, line, result, _LIFE_MS, *added))
        if reply == b"lost":
            raise LeaseLost(batch.id)
        if reply == b"missing":
            raise KeyError(file_id)
        return bool(reply == b"kept")

    async def done(self, batch: BatchKey) -> bytes:
        """One bit per line, the first line's is the highest of the first byte: set for those that have a result."""
        (reply,) = await self._store.run(("GET", _key(batch, "done")))
        return bytes(reply or b"")

    async def counts(self, batch: BatchKey) -> dict[str, int]:
        """What `keep_result` added up, and as `bytes:<file>` how much it wrote."""
        (reply,) = await self._store.run(("HGETALL", _key(batch, "counts")))
        return {name.decode(): int(value) for name, value in _pairs(reply).items()}


def is_done(done: bytes, line: int) -> bool:
    """Whether the line's bit is set in what `BatchStore.done` returned."""
    return line // 8 < len(done) and bool(done[line // 8] >> (7 - line % 8) & 1)


def _key(batch: BatchKey, part: str) -> str:
    return keys.batch(batch.tenant, batch.id, part)


def _pairs(reply: object) -> dict[bytes, bytes]:
    """HGETALL comes as a flat list or as a mapping, depending on the client's version."""
    if isinstance(reply, dict):
        return reply
    assert isinstance(reply, list)
    return dict(zip(reply[::2], reply[1::2], strict=True))
