"""What an engine has of adapters: brought once, kept while somebody wants or uses it, never other than asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from noria.engine.adapters import Adapters, AdapterWatch
from noria.engine.models.errors import ModelError
from noria.engine.models.lora import Adapter
from noria.engine.wire import keys
from noria.engine.wire.adapters import (
    AdapterReport,
    EngineAdapterList,
    GatewayAdapterLists,
    ListedAdapter,
    parse_list,
    staged,
)
from noria.engine.wire.connection import AsyncStore
from noria.engine.wire.messages import AdapterRef
from tests.gateway.conftest import eventually


class Shelf:
    """Adapters by folder: the digest is the file's text; one is read when `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[str] = []
        self.adapters = Adapters(self.load)

    def load(self, folder: Path) -> Adapter:
        self.gate.wait(10)
        self.reads.append(folder.name)
        if not folder.exists():
            raise ModelError(f"{folder}: missing")
        return Adapter({}, None, folder.read_text(), 8)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    found = Shelf()
    yield found
    found.adapters.close()


def ref(path: Path, digest: str, name: str = "n") -> AdapterRef:
    return AdapterRef(name, str(path), digest)


def test_an_adapter_is_read_once_for_all_who_wait(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    shelf.gate.clear()
    first, second = (shelf.adapters.bring(ref(tmp_path / "a", "one")) for _ in range(2))
    assert first is second and first is not None
    shelf.gate.set()
    assert first.result(5) == "one" and shelf.adapters.bring(ref(tmp_path / "a", "one")) is None
    assert shelf.reads == ["a"] and shelf.adapters.num_bytes == 8


def test_files_that_were_changed_are_not_taken(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("other")
    coming = shelf.adapters.bring(ref(tmp_path / "a", "one"))
    assert coming is not None
    with pytest.raises(ModelError, match="have changed"):
        coming.result(5)
    assert not shelf.adapters.loaded and shelf.adapters.counts.failures == 1


def test_what_is_in_use_or_listed_stays(shelf: Shelf, tmp_path: Path) -> None:
    for digest in ("one", "two", "three"):
        (tmp_path / digest).write_text(digest)
        shelf.adapters.load_now(digest, tmp_path / digest)
    assert not shelf.adapters.has_spare
    shelf.adapters.want({"one"})
    assert shelf.adapters.has_spare
    shelf.adapters.let_go({"two"})
    assert set(shelf.adapters.loaded) == {"one", "two"}
    shelf.adapters.let_go(())
    assert set(shelf.adapters.loaded) == {"one"} and not shelf.adapters.has_spare


async def test_the_list_is_followed_and_reported(store: str, shelf: Shelf, tmp_path: Path) -> None:
    redis.Redis.from_url(store).flushall()
    (tmp_path / "own").write_text("own")
    shelf.adapters.load_now("own", tmp_path / "own")
    watch = AdapterWatch(shelf.adapters, EngineAdapterList(store, "m", "e"))
    watch.start()
    backend = AsyncStore(store)
    lists = GatewayAdapterLists(backend)
    (tmp_path / "late").write_text("late")
    entry = ListedAdapter(AdapterRef("late", str(tmp_path / "late"), ""), 2**40, "mark")
    lost = ListedAdapter(AdapterRef("lost", str(tmp_path / "lost"), ""), 2**40, "lost")
    void = ListedAdapter(AdapterRef("void", str(tmp_path / "late"), ""), 1, "void")
    try:
        assert await lists.stage("m", entry) and await lists.stage("m", entry)  # a command may be repeated
        assert not await lists.stage("m", ListedAdapter(entry.ref, 2**40, "another"))
        assert await lists.stage("m", lost) and await lists.stage("m", void)
        assert await lists.stage("m", ListedAdapter(void.ref, 1, "again")), "who began it is dead"
        eventually(lambda: "lost" in shelf.reads and "late" in shelf.adapters.loaded)
        for _ in range(100):
            (said,) = await lists.reports("m", ["e"])
            if len(said) == 3:
                break
            threading.Event().wait(0.02)
        assert said[staged("late")] == AdapterReport("mark", "late") and said["own"].digest == "own"
        assert "missing" in said[staged("lost")].error and staged("void") not in said
        assert await lists.take_off("m", staged("late")) and not await lists.take_off("m", "nobody")
        eventually(lambda: shelf.adapters.has_spare)
    finally:
        watch.close()
        await backend.close()


def test_what_engines_were_started_with_goes_with_them(store: str) -> None:
    client = redis.Redis.from_url(store)
    client.flushall()

    def enter(*names: str) -> set[str]:
        pool = EngineAdapterList(store, "m", "e")
        pool.enter([AdapterRef(name, f"/{name}", name) for name in names])
        pool.close()
        return set(parse_list(client.hgetall(keys.adapters("m"))))

    assert enter("a", "b") == {"a", "b"}
    client.zadd(keys.engines("m"), {"alive": 1e15})
    assert enter("c") == {"a", "b", "c"}
    client.delete(keys.engines("m"))
    loaded = ListedAdapter(AdapterRef("loaded", "/loaded", "digest"), 1, "mark")
    client.hset(keys.adapters("m"), "loaded", msgspec.msgpack.encode(loaded))
    assert enter("b") == {"b", "loaded"}
