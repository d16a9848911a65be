"""The gateway's background work: contact with the store, the model snapshot, silent requests.

Survives a store that is away, from the start or later. Knows no request's content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from noria.engine.wire.broker import BrokerUnavailable, QueueFull
from noria.gateway.batches.dispatch import BatchDispatch
from noria.gateway.dependencies import cancel_and_wait
from noria.gateway.responses.background import Background
from noria.gateway.services import Services

log = structlog.get_logger(__name__)

_PERIOD = 1.0
"""Seconds between two looks at the pools."""


class Upkeep:
    """Runs between `start` and `stop`."""

    def __init__(self, services: Services, background: Background, dispatch: BatchDispatch) -> None:
        self._services = services
        self._background = background
        self._dispatch = dispatch
        self._tasks: list[asyncio.Task[None]] = []
        self._batches: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(), name="upkeep")]

    async def stop(self) -> None:
        await cancel_and_wait(*self._batches)  # first: their lines leave as clients do, and go on without us
        for sink in list(self._services.pump.sinks()):
            sink.cut_off()
        await self._background.stop()
        await self._services.lingering.stop()
        await self._services.pump.drain(timeout=2.0)
        await cancel_and_wait(*self._tasks)
        await self._services.records.close()
        await self._services.broker.close()

    async def _run(self) -> None:
        await self._connect()
        self._tasks.append(asyncio.create_task(_for_ever("frame pump", self._services.pump.run), name="frame pump"))
        self._tasks.append(asyncio.create_task(_for_ever("background", self._background.run), name="background"))
        tenancy = self._services.tenancy
        if tenancy is not None:
            self._tasks.append(asyncio.create_task(_for_ever("books", tenancy.run), name="books"))
        if self._services.settings.batch_concurrency:
            self._batches.append(asyncio.create_task(self._dispatch.run(), name="batches"))
        await _for_ever("upkeep", self._tend)

    async def _connect(self) -> None:
        pause = 0.1
        while True:
            try:
                return await self._services.broker.start()
            except BrokerUnavailable as error:
                self._services.directory.trouble = str(error)
                log.warning("the store is away; trying again", error=str(error), seconds=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _tend(self) -> None:
        services = self._services
        while True:
            await services.directory.refresh()
            for sink in list(services.pump.sinks()):
                with suppress(BrokerUnavailable, QueueFull):  # the next round tries again
                    await sink.resend_if_silent(services.settings.resend_after)
            await asyncio.sleep(_PERIOD)


async def _for_ever(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Background work must not end quietly: an unforeseen error is logged, and the work begins again."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("background work failed; starting it again", work=name)
        await asyncio.sleep(0.5)
