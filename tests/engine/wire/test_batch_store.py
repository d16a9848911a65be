"""What the store knows of running batches, on both stores: leases, and one result per line whoever writes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bench.store import Store
from noria.engine.wire.batch_store import BatchKey, BatchStore, LeaseLost, is_done
from noria.engine.wire.record_store import RecordStore

BATCH = BatchKey("acme/eu", "batch_1")


@pytest.fixture
async def store(server: Store) -> AsyncIterator[BatchStore]:
    found = BatchStore(server.url)
    yield found
    await found.close()


@pytest.fixture
async def records(server: Store) -> AsyncIterator[RecordStore]:
    found = RecordStore(server.url)
    for name in ("out", "err"):
        await found.put(BATCH.tenant, "file", name, b"", created=1, ttl=60)
    yield found
    await found.close()


async def test_batches_are_seen_until_they_are_shut(store: BatchStore) -> None:
    await store.open(BATCH)
    first = await store.running()
    await store.open(BATCH)
    assert await store.running() == first and list(first) == [BATCH]
    await store.shut(BATCH)
    assert await store.running() == {}


async def test_one_runner_has_the_lease_until_it_lapses(store: BatchStore) -> None:
    assert await store.lease(BATCH, "a", 0.2) and await store.lease(BATCH, "a", 0.2)
    assert not await store.lease(BATCH, "b", 5)
    await store.release(BATCH, "b")  # not b's to give back
    assert not await store.lease(BATCH, "b", 5)
    await asyncio.sleep(0.25)
    assert await store.lease(BATCH, "b", 5) and not await store.lease(BATCH, "a", 5)
    await store.release(BATCH, "b")
    assert await store.lease(BATCH, "a", 5)


async def test_a_line_has_one_result_however_many_write_one(store: BatchStore, records: RecordStore) -> None:
    assert await store.lease(BATCH, "a", 5)
    writers = (store.keep_result(BATCH, "a", 7, "out", b"%d\n" % n, {"completed": 1, "tokens": 3}) for n in range(8))
    assert sorted(await asyncio.gather(*writers)) == [False] * 7 + [True]
    assert not await store.keep_result(BATCH, "a", 7, "err", b"no", {"failed": 1})
    assert await store.counts(BATCH) == {"completed": 1, "tokens": 3, "bytes:out": 2}
    done = await store.done(BATCH)
    assert [line for line in range(20) if is_done(done, line)] == [7]
    with pytest.raises(KeyError):
        await store.keep_result(BATCH, "a", 8, "none", b"x", {})


async def test_without_the_lease_nothing_is_written(store: BatchStore, records: RecordStore) -> None:
    with pytest.raises(LeaseLost):
        await store.keep_result(BATCH, "a", 1, "out", b"x", {"completed": 1})
    assert await store.lease(BATCH, "b", 5)
    with pytest.raises(LeaseLost):
        await store.keep_result(BATCH, "a", 1, "out", b"x", {"completed": 1})
    assert await store.counts(BATCH) == {} and await store.done(BATCH) == b""


async def test_results_are_bytes_of_a_file_and_on_its_books(store: BatchStore, records: RecordStore) -> None:
    assert await store.lease(BATCH, "a", 5)
    results = [bytes([65 + n % 26]) * (40_000 if n % 3 else 10) for n in range(12)] + [b"z" * 300_000]
    for line, result in enumerate(results):
        assert await store.keep_result(BATCH, "a", line, "out", result, {"completed": 1})
    pieces = [piece async for piece in records.read_chunks(BATCH.tenant, "file", "out")]
    assert b"".join(pieces) == b"".join(results)
    assert len(pieces) < len(results)  # small results share a piece
    size = sum(map(len, results))
    assert (await store.counts(BATCH))["bytes:out"] == size
    assert await records.used(BATCH.tenant, "file") == (2, size)
    await records.delete(BATCH.tenant, "file", "out")
    assert await records.used(BATCH.tenant, "file") == (1, 0)
