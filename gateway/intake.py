"""Bytes that arrive in pieces become a record that nobody sees before it is whole; whatever goes wrong, none stays.

Knows no kind of record and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from noria.engine.wire.broker import BrokerUnavailable
from noria.engine.wire.record_store import RecordStore
from noria.gateway.errors import BodyTooLarge, InvalidRequest

DRAFT_LIFE = 120.0
"""Seconds that what has come so far outlives the gateway that was taking it in."""


async def take_in(
    records: RecordStore,
    place: tuple[str, str, str],
    draft: bytes,
    pieces: AsyncIterator[bytes],
    *,
    most: int,
    whole: Callable[[int], tuple[bytes, float]],
) -> None:
    """Write a record with bytes at `place` (tenant, kind, id): `draft` while they come, and in the end what `whole`
    makes of their number: the record and its life in seconds. More than `most` bytes raise `BodyTooLarge`; what
    `pieces` and `whole` raise goes on. Raises RecordsFull and BrokerUnavailable."""
    version = await records.put(*place, draft, created=time.time(), ttl=DRAFT_LIFE)
    assert version is not None
    try:
        body, life = whole(await _append_all(records, place, pieces, most))
        if not await records.replace_if(*place, version, body, ttl=life):
            raise InvalidRequest("The upload took too long.", code="upload_expired")
    except BaseException:
        with suppress(BrokerUnavailable):  # then it goes by itself
            await records.delete(*place)
        raise


async def _append_all(
    records: RecordStore, place: tuple[str, str, str], pieces: AsyncIterator[bytes], most: int
) -> int:
    size = count = 0
    touched = time.monotonic()
    tenant, kind, record_id = place
    async for piece in pieces:
        size += len(piece)
        if size > most:
            raise BodyTooLarge(f"The file has more than the {most} bytes allowed.")
        try:
            await records.append_chunk(*place, count, piece)
        except KeyError:
            raise InvalidRequest("The upload took too long, or was taken away.", code="upload_expired") from None
        count += 1
        if time.monotonic() - touched > DRAFT_LIFE / 4:
            await records.touch(tenant, kind, [record_id], ttl=DRAFT_LIFE)
            touched = time.monotonic()
    return size
