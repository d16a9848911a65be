"""Watches on both stores: one holder at a time, and what a dead one held is taken over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bench.store import Store
from noria.engine.wire.watches import Watches


@pytest.fixture
async def pair(server: Store) -> AsyncIterator[tuple[Watches, Watches]]:
    watches = [Watches(server.url, "test", hold=0.2) for _ in range(2)]
    yield watches[0], watches[1]
    for one in watches:
        await one.close()


async def test_what_is_held_is_not_taken(pair: tuple[Watches, Watches]) -> None:
    mine, others = pair
    assert await mine.hold(["a", "b"]) == []
    assert await others.hold([], take=10) == []
    await asyncio.sleep(0.12)
    assert await mine.hold(["a"], take=10) == []
    await asyncio.sleep(0.12)
    assert await others.hold([], take=10) == ["b"], "b was not renewed"
    assert await mine.hold([], take=10) == [], "b is held again"


async def test_what_was_freed_is_taken_once(pair: tuple[Watches, Watches]) -> None:
    mine, others = pair
    names = [f"n{i}" for i in range(9)]
    await mine.hold(names)
    for name in names:
        await mine.free(name)
    taken = await asyncio.gather(*(watches.hold([], take=3) for watches in (mine, others) * 3))
    assert sorted(name for part in taken for name in part) == names


async def test_what_has_ended_is_nobodys(pair: tuple[Watches, Watches]) -> None:
    mine, others = pair
    await mine.hold(["a"])
    await mine.drop("a")
    await mine.free("a")
    assert await others.hold([], take=10) == []
