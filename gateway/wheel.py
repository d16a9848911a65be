"""The engines' wheels for any number of watchers: one subscription of this gateway, open while somebody watches.

Passes messages on as they are. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from noria.engine.wire.broker import BrokerUnavailable, StoreFault
from noria.engine.wire.wheel import WheelSubscription

log = structlog.get_logger(__name__)

MAX_WATCHERS = 64
BACKLOG = 64
"""Messages kept for a watcher that does not read; of more, the latest."""

_PAUSE = 1.0
"""Seconds before the store is tried again."""


class WheelFeed:
    """One per gateway process."""

    def __init__(self, redis_url: str) -> None:
        self._subscription = WheelSubscription(redis_url)
        self._watchers: set[asyncio.Queue[bytes]] = set()
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        return len(self._watchers) >= MAX_WATCHERS

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[asyncio.Queue[bytes]]:
        """Messages (`WheelNews` as JSON) from now on."""
        news: asyncio.Queue[bytes] = asyncio.Queue(BACKLOG)
        self._watchers.add(news)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="wheel")
        try:
            yield news
        finally:
            self._watchers.discard(news)
            if not self._watchers and self._reading is not None:
                self._reading.cancel()
                self._reading = None

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._subscription.close()

    async def _read(self) -> None:
        while True:
            try:
                async for message in self._subscription.news():
                    for watcher in self._watchers:
                        if watcher.full():
                            watcher.get_nowait()
                        watcher.put_nowait(message)
            except BrokerUnavailable as error:
                log.warning("the wheel cannot be watched", reason=str(error))
                await asyncio.sleep(_PAUSE)
            except StoreFault:
                log.exception("the wheel cannot be watched")
                await asyncio.sleep(_PAUSE)
