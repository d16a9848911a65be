"""One batch from whatever state it is in to its end: check the input, run its lines, write what is left, close.

Every step may be cut off and begun again by another gateway: the store knows which lines are done, and whose batch it
is. Knows no HTTP and no endpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from noria.engine.wire.batch_store import BatchKey, BatchStore, LeaseLost, is_done
from noria.engine.wire.broker import BrokerUnavailable
from noria.gateway.batches.attempts import Ask, Stop, answer, counts
from noria.gateway.batches.lines import Check, Line, answered, numbered, parsed, unanswered
from noria.gateway.batches.register import BatchRegister
from noria.gateway.dependencies import cancel_and_wait
from noria.gateway.errors import ModelNotFound, NotFound, Overloaded
from noria.gateway.files import Files
from noria.gateway.metrics import GatewayMetrics
from noria.gateway.model_directory import ModelDirectory
from noria.gateway.schemas.batches import Batch, Fault, Status
from noria.gateway.services import Tenant

log = structlog.get_logger(__name__)

LEASE = 6.0
"""Seconds after which the batch of a gateway that died is anybody's."""

TICK = 1.0
"""Seconds between two renewals of the lease, and between two looks at whether the batch was cancelled."""

PATIENCE = 30.0
"""Seconds that running lines of a cancelled or expired batch have to end."""

_LEFTOVER = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request executed."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
}


@dataclass(frozen=True, slots=True)
class Tools:
    """What runs share. `slots` bounds the lines of all of them; `forget` drops what is kept under a tenant's
    Idempotency-Key."""

    register: BatchRegister
    store: BatchStore
    files: Files
    directory: ModelDirectory
    metrics: GatewayMetrics
    ask: Ask
    forget: Callable[[str, str], Awaitable[None]]
    slots: asyncio.Semaphore
    concurrency: int
    max_line_bytes: Callable[[], int]


def _tenant(batch: Batch) -> Tenant:
    return Tenant(batch.tenant, batch.weight, batch.cache_group, queue="batch", charged_to=batch.account)


class BatchRun:
    """A batch on which `runner` has the lease; `run` ends with the batch, with `LeaseLost`, or when cancelled."""

    def __init__(self, tools: Tools, key: BatchKey, runner: str) -> None:
        self._tools = tools
        self._key = key
        self._runner = runner
        self._stop = Stop()

    async def run(self) -> None:
        working, holding = asyncio.ensure_future(self._advance()), asyncio.ensure_future(self._hold())
        try:
            await asyncio.wait((working, holding), return_when=asyncio.FIRST_COMPLETED)
            for task in (holding, working):
                if task.done():
                    task.result()
        finally:
            await cancel_and_wait(working, holding)
            with suppress(BrokerUnavailable):
                await self._tools.store.release(self._key, self._runner)

    async def _hold(self) -> None:
        """Keep the lease, and notice that the batch is to end."""
        while True:
            await asyncio.sleep(TICK)
            with suppress(BrokerUnavailable):  # without the lease no result is taken, so there is no harm in going on
                if not await self._tools.store.lease(self._key, self._runner, LEASE):
                    raise LeaseLost(self._key.id)
                batch = await self._tools.register.find(self._key)
                if batch.status == "cancelling" or time.time() >= batch.expires_at:
                    self._stop.ask(PATIENCE)

    async def _advance(self) -> None:
        try:
            batch = await self._tools.register.find(self._key)
            if batch.status == "validating":
                batch = await self._validate(batch)
            if batch.status == "in_progress":
                batch = await self._work(batch)
            if not batch.over:
                await self._finish(batch)
        except NotFound:
            log.warning("a batch is gone from the store", batch=self._key.id)
        await self._tools.store.shut(self._key)

    async def _validate(self, batch: Batch) -> Batch:
        check = Check(batch.endpoint)
        await check.run(self._lines(batch))
        faults = check.faults
        if not faults and check.model is not None:
            try:
                await self._tools.directory.resolve(check.model)
            except ModelNotFound as error:
                faults = [Fault("model_not_found", error.message, None, "body.model")]
            except Overloaded:
                pass  # its lines will wait
        if faults:
            await self._discard(batch)

        def step(batch: Batch) -> Batch:
            if batch.status != "validating":
                return batch
            if faults:
                return batch.at("failed", time.time(), faults=faults)
            return batch.at("in_progress", time.time(), model=check.model, total=check.total)

        return await self._tools.register.change(self._key, step)

    async def _work(self, batch: Batch) -> Batch:
        """Run every line that has no result yet, until all have or the batch is to stop."""
        done = await self._tools.store.done(self._key)
        room = asyncio.Semaphore(self._tools.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                async for number, raw in self._lines(batch):
                    if is_done(done, number):
                        continue
                    await room.acquire()
                    if self._stop.asked.is_set():
                        break
                    task = group.create_task(self._line(batch, parsed(number, raw, batch.endpoint)))
                    task.add_done_callback(lambda _: room.release())
        except ExceptionGroup as group:  # one cause is enough
            raise group.exceptions[0] from None

        def step(batch: Batch) -> Batch:
            return batch.at("finalizing", time.time()) if batch.status == "in_progress" else batch

        return await self._tools.register.change(self._key, step)

    async def _line(self, batch: Batch, line: Line) -> None:
        tools, tenant = self._tools, _tenant(batch)
        key = f"{batch.id}/{line.number}"
        found = await answer(line, batch.endpoint, key, tenant, tools.ask, tools.slots, self._stop)
        if found is None:
            return
        reply, key = found
        result = answered(line.custom_id, reply.status, reply.headers.get("x-request-id", ""), reply.body)
        file_id = batch.output_file_id if reply.status < 400 else batch.error_file_id
        if await self._keep(line.number, file_id, result, counts(reply)):
            tools.metrics.batch_lines.labels("completed" if reply.status < 400 else "failed").inc()
            with suppress(BrokerUnavailable):  # then it goes by itself
                await tools.forget(batch.tenant, key)

    async def _keep(self, number: int, file_id: str, result: bytes, counts: dict[str, int]) -> bool:
        while True:
            try:
                return await self._tools.store.keep_result(self._key, self._runner, number, file_id, result, counts)
            except BrokerUnavailable:
                await asyncio.sleep(TICK)

    async def _finish(self, batch: Batch) -> None:
        """Every line gets its one result; what was written becomes visible; the batch is over."""
        end: Status = "completed"
        if batch.status == "cancelling":
            end = "cancelled"
        elif time.time() >= batch.expires_at:
            end = "expired"
        if end != "completed" and batch.total:
            await self._give_up_on_the_rest(batch, end)
        counts = await self._tools.store.counts(self._key)
        if end == "expired" and not counts.get("expired"):
            end = "completed"  # the last line was just in time
        faults = []
        if counts.get("completed", 0) + counts.get("failed", 0) < batch.total:
            end, faults = "failed", [Fault("input_file_gone", "The input file was lost before all lines were run.")]
        for file_id in (batch.output_file_id, batch.error_file_id):
            if written := counts.get(f"bytes:{file_id}", 0):
                await self._tools.files.complete(batch.tenant, file_id, written, batch.output_life)
            else:
                await self._tools.files.discard(batch.tenant, file_id)

        def step(batch: Batch) -> Batch:
            return batch if batch.over else batch.at(end, time.time(), counts=counts, faults=faults)

        await self._tools.register.change(self._key, step)
        log.info("batch over", batch=batch.id, tenant=batch.tenant, status=end, lines=batch.total)

    async def _give_up_on_the_rest(self, batch: Batch, end: str) -> None:
        done = await self._tools.store.done(self._key)
        result_of, added = _LEFTOVER[end], {"failed": 1, end: 1}
        async for number, raw in self._lines(batch):
            if not is_done(done, number):
                custom_id = parsed(number, raw, batch.endpoint).custom_id
                if await self._keep(number, batch.error_file_id, unanswered(custom_id, *result_of), added):
                    self._tools.metrics.batch_lines.labels(end).inc()

    async def _discard(self, batch: Batch) -> None:
        for file_id in (batch.output_file_id, batch.error_file_id):
            await self._tools.files.discard(batch.tenant, file_id)

    async def _lines(self, batch: Batch) -> AsyncIterator[tuple[int, bytes]]:
        async for line in numbered(
            self._tools.files.read(batch.tenant, batch.input_file_id), self._tools.max_line_bytes()
        ):
            yield line
