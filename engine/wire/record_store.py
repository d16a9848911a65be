"""What tenants leave in the store: records with a lifetime, listed in the order of their creation, and bytes in pieces.

Knows no record's meaning and no HTTP. All of one tenant lies in one slot; every command may be repeated.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noria.engine.wire import keys
from noria.engine.wire.connection import (
    RECORD_CHUNK,
    RECORD_DROP,
    RECORD_PAGE,
    RECORD_PUT,
    RECORD_TOUCH,
    AsyncStore,
)

MAX_CHUNK = 256 * 1024
"""Bytes of one piece at most: the store is busy with nothing else while it takes one."""

_CHUNKS_AT_ONCE = 4

_ANY = ""
_NONE = "0"


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """How much one tenant may keep of one kind. With `evict` a new record pushes the oldest out, else it is refused."""

    count: int = 100_000
    size: int = 256 * 1024 * 1024  # bytes
    evict: bool = False


_UNBOUNDED = RecordLimits(count=2**53, size=2**53)


class RecordsFull(Exception):
    """The tenant keeps as much of this kind as it may. `kind` and `limits` say what of, and how much."""

    def __init__(self, kind: str, limits: RecordLimits) -> None:
        super().__init__(f"no more than {limits.count} records and {limits.size} bytes of kind {kind!r} are kept")
        self.kind = kind
        self.limits = limits


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as it lies in the store. `version` changes with every write."""

    id: str
    body: bytes
    version: str
    created: float


class RecordStore:
    """Records by tenant, kind and id. All methods raise BrokerUnavailable.

    A kind may have a part behind a slash (`item/conv_1`): it is listed on its own and counts towards the limits of the
    kind before the slash. Ids hold no slash. `created` orders: any number that grows. `ttl` is in seconds; a record
    whose time has come is gone at once and stops counting with the next access to its kind.
    """

    def __init__(
        self, redis_url: str, limits: Mapping[str, RecordLimits] | None = None, *, default: RecordLimits | None = None
    ) -> None:
        self._store = AsyncStore(redis_url)
        self._limits = limits or {}
        self._default = default or RecordLimits()

    async def close(self) -> None:
        await self._store.close()

    async def put(
        self, tenant: str, kind: str, record_id: str, body: bytes, *, created: float, ttl: float, new: bool = False
    ) -> str | None:
        """Write the record, whatever was there (its age is kept then), and return its version. With `new`: only if
        there is none, else return None. Raises RecordsFull."""
        return await self._put(tenant, kind, record_id, body, _NONE if new else _ANY, created=created, ttl=ttl)

    async def replace_if(
        self,
        tenant: str,
        kind: str,
        record_id: str,
        old_version: str,
        body: bytes,
        *,
        ttl: float | None = None,
        bounded: bool = True,
    ) -> str | None:
        """Write the record if `old_version` is still there, and return the new version, else None. Its lifetime stays,
        or becomes `ttl` from now where that is longer. Raises RecordsFull, but not unless `bounded`: for what must be
        written however much there is."""
        return await self._put(tenant, kind, record_id, body, old_version, created=0, ttl=ttl, bounded=bounded)

    async def get(self, tenant: str, kind: str, record_id: str) -> StoredRecord | None:
        (found,) = await self.get_many(tenant, kind, [record_id])
        return found

    async def get_many(self, tenant: str, kind: str, record_ids: Sequence[str]) -> list[StoredRecord | None]:
        """In the order asked for; None where there is none."""
        ledger, part = _split(kind)
        names = [keys.entry(tenant, ledger, part, record_id) for record_id in record_ids]
        replies = await self._store.run(*(("HMGET", name, "body", "version", "created") for name in names))
        return [
            None if reply[0] is None else _record(record_id, *reply)
            for record_id, reply in zip(record_ids, replies, strict=True)
        ]

    async def delete(self, tenant: str, kind: str, record_id: str) -> bool:
        """Whether it was there. Its bytes go with it."""
        return await self._drop(tenant, kind, record_id) > 0

    async def clear(self, tenant: str, kind: str) -> int:
        """Delete all records listed under this kind (or part of one); returns how many."""
        return await self._drop(tenant, kind)

    async def touch(self, tenant: str, kind: str, record_ids: Sequence[str] | None, *, ttl: float) -> None:
        """These records, or all of this kind or part, live `ttl` from now at least."""
        if record_ids is None or record_ids:
            ledger, part = _split(kind)
            await self._store.run(RECORD_TOUCH(keys.records(tenant, ledger), part, _ms(ttl), *(record_ids or ())))

    async def page(
        self,
        tenant: str,
        kind: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int,
        descending: bool = False,
    ) -> tuple[list[StoredRecord], bool]:
        """Up to `limit` records in the order of (created, id), and whether there are more of them: behind the record
        `after`, ahead of the record `before` (its nearest neighbours, where `after` is not given). Raises KeyError
        where one of those is not known."""
        ledger, part = _split(kind)
        (reply,) = await self._store.run(
            RECORD_PAGE(keys.records(tenant, ledger), part, after or "", before or "", limit, int(descending))
        )
        if reply is None:
            raise KeyError(after or before)
        fields = reply[1:]
        listed = [_record(fields[at].decode(), *fields[at + 1 : at + 4]) for at in range(0, len(fields), 4)]
        return listed, bool(reply[0])

    async def append_chunk(self, tenant: str, kind: str, record_id: str, place: int, chunk: bytes) -> None:
        """Append to the record's bytes, behind `place` pieces: a piece of up to `MAX_CHUNK` bytes that is there
        already is not written again. Raises KeyError where there is no such record, ValueError where pieces are missing
        before it, and RecordsFull."""
        if len(chunk) > MAX_CHUNK:
            raise ValueError(f"a chunk has {MAX_CHUNK} bytes at most, not {len(chunk)}")
        ledger, part = _split(kind)
        limits = self._limits_of(ledger)
        (reply,) = await self._store.run(
            RECORD_CHUNK(keys.records(tenant, ledger), part, record_id, place, chunk, limits.size)
        )
        if reply == b"missing":
            raise KeyError(record_id)
        if reply == b"gap":
            raise ValueError(f"chunk {place} of {record_id!r} has no predecessor")
        if reply == b"full":
            raise RecordsFull(ledger, limits)

    async def read_chunks(self, tenant: str, kind: str, record_id: str) -> AsyncIterator[bytes]:
        """The record's bytes, piece by piece; nothing where there are none. Memory holds a few pieces at a time."""
        key, place = keys.chunks(tenant, *_split(kind), record_id), 0
        while True:
            (chunks,) = await self._store.run(("LRANGE", key, place, place + _CHUNKS_AT_ONCE - 1))
            for chunk in chunks:
                yield chunk
            place += len(chunks)
            if len(chunks) < _CHUNKS_AT_ONCE:
                return

    async def used(self, tenant: str, kind: str) -> tuple[int, int]:
        """Records and bytes that the tenant keeps of a kind (without a part), those just expired included."""
        prefix = keys.records(tenant, kind)
        count, size = await self._store.run(("HLEN", prefix + "sizes"), ("GET", prefix + "bytes"))
        return int(count), int(size or 0)

    async def _put(
        self,
        tenant: str,
        kind: str,
        record_id: str,
        body: bytes,
        old: str,
        *,
        created: float,
        ttl: float | None,
        bounded: bool = True,
    ) -> str | None:
        ledger, part = _split(kind)
        if "/" in record_id:
            raise ValueError(f"a record's id holds no slash: {record_id!r}")
        limits, version = self._limits_of(ledger) if bounded else _UNBOUNDED, secrets.token_hex(8)
        lifetime = "" if ttl is None else _ms(ttl)
        (reply,) = await self._store.run(
            RECORD_PUT(
                keys.records(tenant, ledger),
                part,
                record_id,
                body,
                repr(float(created)),
                lifetime,
                version,
                old,
                limits.count,
                limits.size,
                int(limits.evict),
            )
        )
        if reply == b"full":
            raise RecordsFull(ledger, limits)
        return version if reply == b"kept" else None

    async def _drop(self, tenant: str, kind: str, *record_ids: str) -> int:
        ledger, part = _split(kind)
        (dropped,) = await self._store.run(RECORD_DROP(keys.records(tenant, ledger), part, *record_ids))
        return int(dropped)

    def _limits_of(self, ledger: str) -> RecordLimits:
        return self._limits.get(ledger, self._default)


def _split(kind: str) -> tuple[str, str]:
    """The kind whose limits hold, and the part of it that is listed on its own."""
    ledger, _, part = kind.partition("/")
    return ledger, part


def _record(record_id: str, body: Any, version: Any, created: Any) -> StoredRecord:
    return StoredRecord(record_id, bytes(body), version.decode(), float(created))


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
