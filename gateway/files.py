"""What tenants upload, and what batches write for them: files in the store, seen by nobody before they are whole.

Knows no HTTP and no file's meaning.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from noria.engine.wire.record_store import RecordStore
from noria.gateway.errors import BodyTooLarge, NotFound
from noria.gateway.intake import take_in
from noria.gateway.records import FILE
from noria.gateway.schemas.files import OUTPUT, FileRecord

MAX_BATCH_BYTES = 200 * 1024 * 1024
"""Bytes of a file for a batch at most, as OpenAI has it."""

BATCH_FILE_LIFE = 30 * 86_400
"""Seconds that a batch's input and output are kept unless somebody says otherwise, as OpenAI has it."""

_FOR_EVER = 100 * 365 * 86_400.0
_PAGE = 1000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FileRecord).decode


def new_id() -> str:
    return f"file-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Description:
    """What a new file is. `life` in seconds; None: as its purpose has it."""

    filename: str
    purpose: str
    life: int | None


class Files:
    """`max_bytes` is the size of one file at most. All methods raise BrokerUnavailable."""

    def __init__(self, records: RecordStore, max_bytes: int) -> None:
        self._records = records
        self._max_bytes = max_bytes

    async def take_in(
        self, tenant: str, pieces: AsyncIterator[bytes], described: Callable[[int], Description]
    ) -> tuple[str, FileRecord]:
        """A new file of pieces that are just arriving. `described` says what it is once they are all here, of so many
        bytes. Whatever goes wrong, nothing stays behind.

        Raises `InvalidRequest`, `BodyTooLarge` and RecordsFull.
        """
        file_id, now = new_id(), int(time.time())
        made: list[FileRecord] = []

        def whole(size: int) -> tuple[bytes, float]:
            about = described(size)
            life = about.life
            if about.purpose == "batch":
                if size > MAX_BATCH_BYTES:
                    raise BodyTooLarge(f"A file for a batch has {MAX_BATCH_BYTES} bytes at most; this one has {size}.")
                life = life or BATCH_FILE_LIFE
            expires_at = None if life is None else now + life
            made.append(FileRecord(about.filename, about.purpose, now, size, expires_at, complete=True))
            return _encode(made[0]), life or _FOR_EVER

        draft = _encode(FileRecord("", "", now))
        await take_in(self._records, (tenant, FILE, file_id), draft, pieces, most=self._max_bytes, whole=whole)
        return file_id, made[0]

    async def find(self, tenant: str, file_id: str, *, param: str = "id") -> FileRecord:
        """Raises `NotFound`."""
        record = None if "/" in file_id else await self._records.get(tenant, FILE, file_id)
        file = None if record is None else _decode(record.body)
        if file is None or file.gone(time.time()):
            raise NotFound(f"No such File object: {file_id[:128]}", param=param)
        return file

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises `NotFound`."""
        await self.find(tenant, file_id)
        await self._records.delete(tenant, FILE, file_id)

    def read(self, tenant: str, file_id: str) -> AsyncIterator[bytes]:
        """The file's bytes; nothing where it has gone."""
        return self._records.read_chunks(tenant, FILE, file_id)

    async def page(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, descending: bool
    ) -> tuple[list[tuple[str, FileRecord]], bool]:
        """Up to `limit` files and whether there are more. Raises KeyError where `after` is not known."""
        listed: list[tuple[str, FileRecord]] = []
        more = True
        while more:
            size = min(_PAGE, limit + 1)
            found, more = await self._records.page(tenant, FILE, after=after, limit=size, descending=descending)
            for record in found:
                file = _decode(record.body)
                after = record.id
                if file.gone(time.time()) or (purpose is not None and file.purpose != purpose):
                    continue
                if len(listed) == limit:
                    return listed, True
                listed.append((record.id, file))
        return listed, False

    async def keep_for(self, tenant: str, file_id: str, seconds: float) -> None:
        """The bytes stay at least so long, even if the file expires before."""
        await self._records.touch(tenant, FILE, [file_id], ttl=seconds)

    async def begin(self, tenant: str, file_id: str, filename: str, life: float) -> None:
        """A file that a batch will write; nothing where it has been begun. `life` in seconds: until it is complete."""
        now = time.time()
        draft = _encode(FileRecord(filename, OUTPUT, int(now)))
        await self._records.put(tenant, FILE, file_id, draft, created=now, ttl=life, new=True)

    async def complete(self, tenant: str, file_id: str, size: int, life: int) -> None:
        """What was begun is whole now; `life` counts from now, in seconds."""
        found = await self._records.get(tenant, FILE, file_id)
        if found is None or (file := _decode(found.body)).complete:
            return
        now = int(time.time())
        whole = msgspec.structs.replace(file, size=size, created_at=now, expires_at=now + life, complete=True)
        await self._records.replace_if(tenant, FILE, file_id, found.version, _encode(whole), ttl=life)

    async def discard(self, tenant: str, file_id: str) -> None:
        """Take away what was begun, or nothing."""
        await self._records.delete(tenant, FILE, file_id)
