"""Which batches this gateway runs: those that nobody else has, for as long as it lives and does not drain.

Knows no batch's state.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import structlog

from noria.engine.wire.batch_store import BatchKey, LeaseLost
from noria.engine.wire.broker import BrokerUnavailable
from noria.gateway.batches.run import LEASE, BatchRun, Tools
from noria.gateway.dependencies import cancel_and_wait
from noria.gateway.drain import Drain

log = structlog.get_logger(__name__)

MAX_HELD = 64
"""Batches that one gateway runs at once; their lines share its slots."""

_LOOK_EVERY = 1.0
_DRAIN_LOOK = 0.2
_REST = 30.0
"""Seconds before a batch whose run failed for no known reason is tried again here."""


class BatchDispatch:
    """One per gateway process; `runner` is its name in leases."""

    def __init__(self, tools: Tools, drain: Drain, runner: str) -> None:
        self._tools = tools
        self._drain = drain
        self._runner = runner
        self._runs: dict[BatchKey, asyncio.Task[None]] = {}
        self._resting: dict[BatchKey, float] = {}  # until when, monotonic

    async def run(self) -> None:
        """Until the gateway drains, or cancelled; then the batches are anybody's."""
        try:
            looked, added = 0.0, self._tools.register.added
            while not self._drain.begun:
                if added.is_set() or time.monotonic() - looked >= _LOOK_EVERY:
                    added.clear()
                    looked = time.monotonic()
                    with suppress(BrokerUnavailable):
                        await self._look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DRAIN_LOOK):
                        await added.wait()
        finally:
            await cancel_and_wait(*self._runs.values())

    async def _look(self) -> None:
        now = time.monotonic()
        for key in await self._tools.store.running():
            if len(self._runs) >= MAX_HELD:
                return
            if key in self._runs or self._resting.get(key, 0) > now:
                continue
            if await self._tools.store.lease(key, self._runner, LEASE):
                self._resting.pop(key, None)
                self._runs[key] = asyncio.create_task(self._run(key), name=f"batch {key.id}")

    async def _run(self, key: BatchKey) -> None:
        self._tools.metrics.batches_running.inc()
        try:
            await BatchRun(self._tools, key, self._runner).run()
        except LeaseLost:
            log.warning("another gateway took over a batch", batch=key.id)
        except BrokerUnavailable as error:
            log.warning("a batch waits for the store", batch=key.id, error=str(error))
        except Exception:
            log.exception("a batch failed to run; trying again later", batch=key.id)
            self._resting[key] = time.monotonic() + _REST
        finally:
            self._tools.metrics.batches_running.dec()
            self._runs.pop(key, None)
