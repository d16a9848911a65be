"""Files that come in parts: parts lie in the store on their own for an hour, and become one file when that is wished.

Knows no HTTP and no file's meaning.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from noria.engine.wire.record_store import MAX_CHUNK, RecordStore, StoredRecord
from noria.gateway.errors import GatewayError, InvalidRequest, NotFound, WrongState
from noria.gateway.files import MAX_BATCH_BYTES, Description, Files
from noria.gateway.intake import take_in
from noria.gateway.records import PART, UPLOAD
from noria.gateway.schemas.files import FileRecord
from noria.gateway.schemas.uploads import LIFE, MAX_PART_BYTES, PartRecord, UploadRecord, UploadRequest

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(UploadRecord).decode
_decode_part = msgspec.msgpack.Decoder(PartRecord).decode


class Uploads:
    """`max_bytes` is the size of one file at most. All methods raise BrokerUnavailable."""

    def __init__(self, records: RecordStore, files: Files, max_bytes: int) -> None:
        self._records = records
        self._files = files
        self._max_bytes = max_bytes

    async def create(self, tenant: str, request: UploadRequest) -> tuple[str, UploadRecord]:
        """Raises `InvalidRequest` for a file that could never be, and RecordsFull."""
        most = min(self._max_bytes, MAX_BATCH_BYTES) if request.purpose == "batch" else self._max_bytes
        if request.bytes > most:
            message = (
                f"Invalid 'bytes': integer above maximum value. Expected a value <= {most}, but got {request.bytes}."
            )
            raise InvalidRequest(message, param="bytes", code="integer_above_max_value")
        upload_id, now = f"upload_{secrets.token_hex(12)}", int(time.time())
        life = request.expires_after.seconds if request.expires_after else None
        upload = UploadRecord(request.filename, request.purpose, request.bytes, now, life)
        await self._records.put(tenant, UPLOAD, upload_id, _encode(upload), created=now, ttl=LIFE)
        return upload_id, upload

    async def add_part(self, tenant: str, upload_id: str, pieces: AsyncIterator[bytes]) -> tuple[str, PartRecord]:
        """A new part from pieces that are just arriving. Raises `NotFound`, `WrongState`, `BodyTooLarge` and
        RecordsFull."""
        _, upload = await self._pending(tenant, upload_id)
        part_id, now = f"part_{secrets.token_hex(12)}", int(time.time())
        made: list[PartRecord] = []

        def whole(size: int) -> tuple[bytes, float]:
            made.append(PartRecord(now, size, complete=True))
            return _encode(made[0]), max(1.0, upload.expires_at - time.time())

        place = (tenant, _parts(upload_id), part_id)
        most = min(MAX_PART_BYTES, upload.size)
        async with self._unless_ended(tenant, upload_id):
            await take_in(self._records, place, _encode(PartRecord(now)), pieces, most=most, whole=whole)
        try:
            await self._pending(tenant, upload_id)
        except GatewayError:  # the upload ended before the part lay there
            await self._records.delete(*place)
            raise
        return part_id, made[0]

    async def complete(
        self, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None
    ) -> tuple[UploadRecord, FileRecord]:
        """One file of these parts, in this order. Raises `NotFound`, `WrongState`, `InvalidRequest` and RecordsFull."""
        found, upload = await self._pending(tenant, upload_id)
        async with self._unless_ended(tenant, upload_id):
            await self._check_parts(tenant, upload_id, upload, part_ids)
        digest = hashlib.md5(usedforsecurity=False)

        def described(size: int) -> Description:
            if size != upload.size:  # a part has just expired
                raise InvalidRequest("The upload has expired.", param="upload_id", code="upload_expired")
            if md5 is not None and digest.hexdigest() != md5.lower():
                message = f"Invalid 'md5': the parts have the checksum {digest.hexdigest()}."
                raise InvalidRequest(message, param="md5", code="checksum_mismatch")
            return Description(upload.filename, upload.purpose, upload.life)

        joined = self._joined(tenant, upload_id, part_ids, digest)
        async with self._unless_ended(tenant, upload_id):
            file_id, file = await self._files.take_in(tenant, joined, described)
        done = msgspec.structs.replace(upload, status="completed", file_id=file_id)
        if not await self._records.replace_if(tenant, UPLOAD, upload_id, found.version, _encode(done)):
            await self._files.delete(tenant, file_id)
            raise WrongState("The upload was completed or cancelled meanwhile.", param="upload_id")
        await self._records.clear(tenant, _parts(upload_id))
        return done, file

    async def cancel(self, tenant: str, upload_id: str) -> UploadRecord:
        """Raises `NotFound` and `WrongState`."""
        found, upload = await self._pending(tenant, upload_id)
        cancelled = msgspec.structs.replace(upload, status="cancelled")
        if not await self._records.replace_if(tenant, UPLOAD, upload_id, found.version, _encode(cancelled)):
            raise WrongState("The upload was completed or cancelled meanwhile.", param="upload_id")
        await self._records.clear(tenant, _parts(upload_id))
        return cancelled

    async def _pending(self, tenant: str, upload_id: str) -> tuple[StoredRecord, UploadRecord]:
        found = None if "/" in upload_id else await self._records.get(tenant, UPLOAD, upload_id)
        if found is None:
            message = f"No such Upload object: {upload_id[:128]}. An upload expires an hour after its creation."
            raise NotFound(message, param="upload_id")
        upload = _decode(found.body)
        if upload.status != "pending":
            raise WrongState(f"The upload {upload_id} is {upload.status}.", param="upload_id")
        return found, upload

    @asynccontextmanager
    async def _unless_ended(self, tenant: str, upload_id: str) -> AsyncIterator[None]:
        """A request that fails since the upload was completed or cancelled meanwhile, its parts gone with it, is told
        so."""
        try:
            yield
        except InvalidRequest:
            await self._pending(tenant, upload_id)
            raise

    async def _check_parts(self, tenant: str, upload_id: str, upload: UploadRecord, part_ids: Sequence[str]) -> None:
        named = [part_id.replace("/", "?") for part_id in part_ids]
        found = await self._records.get_many(tenant, _parts(upload_id), named) if named else []
        size, seen = 0, set[str]()
        for place, (part_id, record) in enumerate(zip(part_ids, found, strict=True)):
            part = None if record is None else _decode_part(record.body)
            if part is None or not part.complete or part_id in seen:
                why = "is named twice" if part_id in seen else "is no part of this upload"
                param = f"part_ids[{place}]"
                raise InvalidRequest(f"Invalid '{param}': '{part_id}' {why}.", param=param, code="invalid_value")
            seen.add(part_id)
            size += part.size
        if size != upload.size:
            message = f"Invalid 'part_ids': the parts have {size} bytes, but the upload was created for {upload.size}."
            raise InvalidRequest(message, param="part_ids", code="size_mismatch")

    async def _joined(
        self, tenant: str, upload_id: str, part_ids: Sequence[str], digest: hashlib._Hash
    ) -> AsyncIterator[bytes]:
        """The bytes of the parts in pieces as large as the store takes them."""
        held = bytearray()
        for part_id in part_ids:
            async for piece in self._records.read_chunks(tenant, _parts(upload_id), part_id):
                digest.update(piece)
                held += piece
                while len(held) >= MAX_CHUNK:
                    yield bytes(held[:MAX_CHUNK])
                    del held[:MAX_CHUNK]
        if held:
            yield bytes(held)


def _parts(upload_id: str) -> str:
    return f"{PART}/{upload_id}"
