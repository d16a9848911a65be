"""Work that one process of many must see to its end, whoever dies: each piece is held for a while, or free to take.

Knows names only, not what is to be done.
"""

from __future__ import annotations

from collections.abc import Iterable

from noria.engine.wire import keys
from noria.engine.wire.connection import WATCH, AsyncStore


class Watches:
    """Names of one purpose. A name is held for `hold` seconds and free then. All methods raise BrokerUnavailable."""

    def __init__(self, redis_url: str, purpose: str, *, hold: float) -> None:
        self._store = AsyncStore(redis_url)
        self._key = keys.watches(purpose)
        self._hold_ms = int(hold * 1000)

    async def hold(self, names: Iterable[str], *, take: int = 0) -> list[str]:
        """Hold these names, new or held already, and take over up to `take` that are free: those are returned."""
        (taken,) = await self._store.run(WATCH(self._key, self._hold_ms, take, *names))
        return [name.decode() for name in taken]

    async def free(self, name: str) -> None:
        """Anybody may take it now."""
        await self._store.run(("ZADD", self._key, "XX", 0, name))

    async def drop(self, name: str) -> None:
        """It has come to its end."""
        await self._store.run(("ZREM", self._key, name))

    async def close(self) -> None:
        await self._store.close()
