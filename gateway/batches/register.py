"""The batches of all tenants as records: created, found, listed, and moved from state to state by whoever comes first.

Knows no line and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from noria.engine.wire.batch_store import BatchKey, BatchStore
from noria.engine.wire.record_store import RecordStore
from noria.gateway.errors import NotFound
from noria.gateway.records import BATCH
from noria.gateway.schemas.batches import Batch

BATCH_LIFE = 32 * 86_400.0
"""Seconds that a batch is remembered: a little longer than what it wrote, as a rule."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Batch).decode


class BatchRegister:
    """`added` is set when this gateway takes a batch in: who runs batches clears it. All methods raise
    BrokerUnavailable."""

    def __init__(self, records: RecordStore, store: BatchStore) -> None:
        self._records = records
        self._store = store
        self.added = asyncio.Event()

    async def add(self, batch: Batch) -> None:
        """A new one: from now on it will run. Raises RecordsFull."""
        key = BatchKey(batch.tenant, batch.id)
        await self._store.open(key)  # before: should this gateway die now, some runner finds that there is nothing
        await self._records.put(
            batch.tenant, BATCH, batch.id, _encode(batch), created=batch.created_at, ttl=BATCH_LIFE, new=True
        )
        await self._store.open(key)  # once more, in case that one has been so quick
        self.added.set()

    async def find(self, key: BatchKey) -> Batch:
        """Raises `NotFound`."""
        return (await self._get(key))[0]

    async def change(self, key: BatchKey, step: Callable[[Batch], Batch]) -> Batch:
        """The batch after `step`, which may be asked again for a batch that somebody else has changed meanwhile, and
        returns the very same batch for no change. Raises `NotFound` and what `step` raises."""
        while True:
            batch, version = await self._get(key)
            changed = step(batch)
            if changed is batch:
                return batch
            packed = _encode(changed)
            if await self._records.replace_if(key.tenant, BATCH, key.id, version, packed, bounded=False):
                return changed

    async def page(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """The newest first, and whether there are more. Raises KeyError where `after` is not known."""
        found, more = await self._records.page(tenant, BATCH, after=after, limit=limit, descending=True)
        return [_decode(record.body) for record in found], more

    async def counts(self, batch: Batch) -> dict[str, int]:
        """What has been done so far."""
        return batch.counts if batch.over else await self._store.counts(BatchKey(batch.tenant, batch.id))

    async def reading(self, tenant: str, file_id: str) -> Batch | None:
        """A batch that is not over and reads this file."""
        ids = [key.id for key in await self._store.running() if key.tenant == tenant]
        for record in await self._records.get_many(tenant, BATCH, ids) if ids else []:
            if record is not None and (batch := _decode(record.body)).input_file_id == file_id and not batch.over:
                return batch
        return None

    async def _get(self, key: BatchKey) -> tuple[Batch, str]:
        record = None if "/" in key.id else await self._records.get(key.tenant, BATCH, key.id)
        if record is None:
            raise NotFound(f"No batch found with id '{key.id[:128]}'.", param="batch_id")
        return _decode(record.body), record.version
