"""Records on both stores: order, versions, lifetimes, limits, bytes in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bench.store import Store
from noria.engine.wire.broker import BrokerUnavailable
from noria.engine.wire.record_store import MAX_CHUNK, RecordLimits, RecordsFull, RecordStore, StoredRecord

LIMITS = {
    "few": RecordLimits(count=3, size=1000),
    "latest": RecordLimits(count=3, size=1000, evict=True),
    "small": RecordLimits(count=10, size=100),
}


@pytest.fixture
async def store(server: Store) -> AsyncIterator[RecordStore]:
    records = RecordStore(server.url, LIMITS)
    yield records
    await records.close()


async def put(store: RecordStore, kind: str, record_id: str, body: bytes = b"x", *, created: float = 1.0) -> None:
    await store.put("acme", kind, record_id, body, created=created, ttl=60)


def ids(page: tuple[list[StoredRecord], bool]) -> tuple[list[str], bool]:
    return [record.id for record in page[0]], page[1]


async def test_a_record_is_got_replaced_and_deleted(store: RecordStore) -> None:
    assert await store.get("acme", "thing", "a") is None
    version = await store.put("acme", "thing", "a", b"one", created=1.5, ttl=60)
    assert await store.get("acme", "thing", "a") == StoredRecord("a", b"one", version or "", 1.5)
    assert await store.put("acme", "thing", "a", b"two", created=9, ttl=60) not in (None, version)
    found = await store.get("acme", "thing", "a")
    assert found is not None and (found.body, found.created) == (b"two", 1.5)
    assert await store.delete("acme", "thing", "a")
    assert not await store.delete("acme", "thing", "a")
    assert await store.get("acme", "thing", "a") is None


async def test_tenants_and_kinds_do_not_see_each_other(store: RecordStore) -> None:
    await put(store, "thing", "a")
    assert await store.get("other", "thing", "a") is None
    assert await store.get("acme", "other", "a") is None
    assert not await store.delete("other", "thing", "a")
    assert ids(await store.page("other", "thing", limit=10)) == ([], False)


async def test_only_one_of_many_writers_replaces_a_version(store: RecordStore) -> None:
    version = await store.put("acme", "thing", "a", b"0", created=1, ttl=60)
    assert version is not None
    writers = (store.replace_if("acme", "thing", "a", version, b"%d" % n) for n in range(8))
    won = [new for new in await asyncio.gather(*writers) if new]
    found = await store.get("acme", "thing", "a")
    assert found is not None and won == [found.version]
    assert await store.replace_if("acme", "thing", "gone", version, b"1") is None
    assert await store.get("acme", "thing", "gone") is None


async def test_a_new_record_does_not_overwrite(store: RecordStore) -> None:
    assert await store.put("acme", "thing", "a", b"1", created=1, ttl=60, new=True)
    assert await store.put("acme", "thing", "a", b"2", created=1, ttl=60, new=True) is None
    found = await store.get("acme", "thing", "a")
    assert found is not None and found.body == b"1"


async def test_pages_follow_age_then_id(store: RecordStore) -> None:
    for record_id, created in (("c", 1.0), ("b", 2.0), ("a", 2.0), ("d", 3.0)):
        await put(store, "thing", record_id, created=created)
    page = store.page
    assert ids(await page("acme", "thing", limit=3)) == (["c", "a", "b"], True)
    assert ids(await page("acme", "thing", limit=4)) == (["c", "a", "b", "d"], False)
    assert ids(await page("acme", "thing", limit=2, descending=True)) == (["d", "b"], True)
    assert ids(await page("acme", "thing", after="a", limit=5)) == (["b", "d"], False)
    assert ids(await page("acme", "thing", after="b", limit=1, descending=True)) == (["a"], True)
    assert ids(await page("acme", "thing", before="b", limit=1)) == (["a"], True)
    assert ids(await page("acme", "thing", before="b", limit=2)) == (["c", "a"], False)
    assert ids(await page("acme", "thing", after="c", before="d", limit=9)) == (["a", "b"], False)
    assert ids(await page("acme", "thing", before="a", limit=9, descending=True)) == (["d", "b"], False)
    for cursor in ({"after": "zz"}, {"before": "zz"}):
        with pytest.raises(KeyError):
            await page("acme", "thing", limit=1, **cursor)


async def test_parts_are_listed_alone_and_counted_together(store: RecordStore) -> None:
    await put(store, "few/one", "a")
    await put(store, "few/two", "a")
    await put(store, "few/two", "b")
    assert ids(await store.page("acme", "few/two", limit=9)) == (["a", "b"], False)
    assert await store.used("acme", "few") == (3, 3)
    with pytest.raises(RecordsFull, match="3 records"):
        await put(store, "few/one", "b")
    assert await store.clear("acme", "few/two") == 2
    await put(store, "few/one", "b")
    assert ids(await store.page("acme", "few/one", limit=9)) == (["a", "b"], False)


async def test_what_has_expired_leaves_index_and_books(store: RecordStore, server: Store) -> None:
    await store.put("acme", "few", "short", b"12345", created=1, ttl=0.05)
    await store.put("acme", "few", "kept", b"12345", created=2, ttl=0.05)
    await store.touch("acme", "few", ["kept"], ttl=60)
    await asyncio.sleep(0.06)
    assert await store.get("acme", "few", "short") is None
    assert ids(await store.page("acme", "few", limit=9)) == (["kept"], False)
    assert await store.used("acme", "few") == (1, 5)
    assert all(server.client.pttl(key) > 0 for key in server.key_names()), "every key goes by itself"
    await store.delete("acme", "few", "kept")
    assert server.key_names() == set()


async def test_a_lifetime_grows_and_never_shrinks(store: RecordStore, server: Store) -> None:
    version = await store.put("acme", "thing/p", "a", b"1", created=1, ttl=100)
    (key,) = (name for name in server.key_names() if ":entry:" in name)
    await store.touch("acme", "thing/p", None, ttl=10)
    assert server.client.ttl(key) > 90
    assert await store.replace_if("acme", "thing/p", "a", version or "", b"2")
    assert 90 < server.client.ttl(key) <= 100
    await store.touch("acme", "thing/p", None, ttl=1000)
    assert server.client.ttl(key) > 990


async def test_bytes_are_bounded_exactly(store: RecordStore) -> None:
    await put(store, "small", "a", b"x" * 60)
    with pytest.raises(RecordsFull, match="100 bytes"):
        await put(store, "small", "b", b"x" * 41)
    await put(store, "small", "b", b"x" * 40)
    await put(store, "small", "a", b"x" * 10)
    assert await store.used("acme", "small") == (2, 50)
    found = await store.get("acme", "small", "a")
    with pytest.raises(RecordsFull):
        await store.replace_if("acme", "small", "a", found.version if found else "", b"x" * 61)


async def test_the_oldest_make_room_where_that_is_asked_for(store: RecordStore) -> None:
    for created, record_id in enumerate("abcd"):
        await put(store, "latest", record_id, b"x" * 300, created=created)
    assert ids(await store.page("acme", "latest", limit=9)) == (["b", "c", "d"], False)
    await put(store, "latest", "e", b"x" * 700, created=9)
    assert ids(await store.page("acme", "latest", limit=9)) == (["d", "e"], False)
    with pytest.raises(RecordsFull):
        await put(store, "latest", "f", b"x" * 1001, created=10)


async def test_chunks_join_and_go_with_their_record(store: RecordStore, server: Store) -> None:
    with pytest.raises(KeyError):
        await store.append_chunk("acme", "thing", "a", 0, b"x")
    await put(store, "thing", "a", b"12345")
    pieces = [bytes([n]) * (MAX_CHUNK if n < 9 else 3) for n in range(10)]
    for place, piece in enumerate(pieces):
        await store.append_chunk("acme", "thing", "a", place, piece)
    await store.append_chunk("acme", "thing", "a", 4, pieces[4])  # repeated after a lost reply
    with pytest.raises(ValueError, match="predecessor"):
        await store.append_chunk("acme", "thing", "a", 11, b"x")
    with pytest.raises(ValueError, match="at most"):
        await store.append_chunk("acme", "thing", "a", 10, b"x" * (MAX_CHUNK + 1))
    assert [piece async for piece in store.read_chunks("acme", "thing", "a")] == pieces
    assert await store.used("acme", "thing") == (1, 5 + 9 * MAX_CHUNK + 3)
    await put(store, "thing", "a", b"1234567")  # rewriting the record leaves its bytes
    assert await store.used("acme", "thing") == (1, 7 + 9 * MAX_CHUNK + 3)
    assert all(server.client.pttl(key) > 0 for key in server.key_names())
    await store.delete("acme", "thing", "a")
    assert server.key_names() == set()


async def test_chunks_count_towards_the_limit(store: RecordStore) -> None:
    await put(store, "small", "a", b"x" * 10)
    await store.append_chunk("acme", "small", "a", 0, b"x" * 90)
    with pytest.raises(RecordsFull):
        await store.append_chunk("acme", "small", "a", 1, b"x")
    assert [len(piece) async for piece in store.read_chunks("acme", "small", "a")] == [90]


async def test_a_store_that_is_away_is_said_to_be(tmp_path: object) -> None:
    store = RecordStore(f"unix://{tmp_path}/none.sock")
    with pytest.raises(BrokerUnavailable):
        await store.get("acme", "thing", "a")
    await store.close()
