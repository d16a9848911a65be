"""Responses that run without a client: begun here, seen to their end by this gateway or, should it die, by another.

Knows the generation path and the shelves; no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import orjson
import structlog

from noria.engine.wire.broker import BrokerUnavailable
from noria.engine.wire.watches import Watches
from noria.gateway.dependencies import cancel_and_wait
from noria.gateway.errors import DeadlineExpired, GatewayError, ModelNotFound, NotFound, StreamNotFound
from noria.gateway.generation import Generation
from noria.gateway.responses import ids, response
from noria.gateway.responses.asking import reading
from noria.gateway.responses.background_ticket import BackgroundTicket, of_watch, watch_name
from noria.gateway.responses.context import Context, Shelves
from noria.gateway.responses.parts import Shown
from noria.gateway.responses.stored import RUNNING, Job, StoredResponse
from noria.gateway.sampling import settled
from noria.gateway.schemas.responses import ResponseRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.services import Question, Services, Tenant

log = structlog.get_logger(__name__)

HOLD = 15.0
"""Seconds after which a gateway that says nothing is taken for dead."""

EVERY = 4.0
"""Seconds between two looks at what others left."""

_AT_ONCE = 16
"""Responses of dead gateways that one takes over at a time."""

_GRACE = 600.0
"""Seconds behind the deadline after which a response that nobody could read has failed."""


class Background:
    """One per gateway process; `run` is its watch over what others left."""

    def __init__(self, services: Services, shelves: Shelves, watches: Watches) -> None:
        self._services = services
        self._shelves = shelves
        self._watches = watches
        self._runs: dict[str, asyncio.Task[None]] = {}  # by the name of the watch

    async def begin(
        self, tenant: Tenant, request: ResponseRequest, given: dict[str, Any], question: Question, context: Context
    ) -> Shown:
        """Keep the response and put it on the queue; returns it. Raises a `GatewayError` where it is not taken."""
        self._services.directory.require_live(question.model)
        group, created = ids.new_group(), int(time.time())
        card = question.model.card
        shown = settled(card, request)
        begun = response.begun(shown, response_id=ids.RESPONSE + group, model=card.id, created=created)
        job = Job(
            body=orjson.dumps({**given, "input": ""}),
            model=question.model.card.id,
            prompt_tokens=len(question.prompts[0]),
            until=created + self._services.settings.request_timeout,
            base=card.base,
        )
        own = orjson.dumps(context.own_items(group))
        stored = StoredResponse(orjson.dumps(begun), own, context.chain, job)
        await self._shelves.responses.put(tenant.id, stored)
        name = watch_name(tenant.id, begun["id"])
        await self._watches.hold([name])
        ticket = self._ticket(tenant.id, stored, request, question, following=False)
        generation = self._services.generation(tenant, question, group, ticket)
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start(name, self._see_through(generation, ticket, name, entered))
        try:
            await asyncio.shield(entered)
        except GatewayError:
            await self._shelves.responses.delete(tenant.id, begun["id"])
            raise
        return begun

    async def follow(self, tenant: str, stored: StoredResponse) -> tuple[Generation, BackgroundTicket]:
        """The answer of a background response, to be read once more from its beginning. Raises a `GatewayError`."""
        assert stored.job is not None
        request = parse(ResponseRequest, orjson.loads(stored.job.body))
        try:
            model, options = await reading(self._services, request, stored.job.model)
        except ModelNotFound:  # an adapter that was unloaded: what is said reads as its model's words do
            model, options = await reading(self._services, request, stored.job.pool)
        ticket = BackgroundTicket(self._shelves, self._watches, tenant, stored, request, model, options, following=True)
        group = str(stored.response["id"]).removeprefix(ids.RESPONSE)
        generation = self._services.following(model, options, [stored.job.prompt_tokens], 1, group, ticket)
        return generation, ticket

    async def cancel(self, tenant: str, stored: StoredResponse) -> Shown:
        """The response as it is then: cancelled, unless it had ended."""

        def change(now: StoredResponse) -> StoredResponse | None:
            found = now.response
            return now.with_response({**found, "status": "cancelled"}) if found["status"] in RUNNING else None

        response_id = stored.response["id"]
        changed = await self._shelves.responses.change(tenant, response_id, change)
        if changed is None:
            raise NotFound(f"Response with id '{response_id}' not found.")
        if stored.job is not None and changed.response["status"] == "cancelled":
            await self._services.broker.cancel(stored.job.pool, _request_id(response_id))
            await self._watches.drop(watch_name(tenant, response_id))
        return changed.response

    async def status(self, stored: StoredResponse) -> Shown:
        """The response with its state of this moment."""
        shown = stored.response
        if stored.job is not None and shown["status"] == "queued":
            waiting = await self._services.broker.position(stored.job.pool, _request_id(shown["id"]))
            if waiting is None:
                shown["status"] = "in_progress"
        return shown

    async def run(self) -> None:
        """Hold what runs here, and take over what dead gateways held; until cancelled."""
        while True:
            with suppress(BrokerUnavailable):
                for name in await self._watches.hold(list(self._runs), take=_AT_ONCE):
                    if name not in self._runs:
                        self._start(name, self._take_over(name))
            await asyncio.sleep(EVERY)

    async def stop(self) -> None:
        """The gateway ends: others go on."""
        if self._runs:
            await asyncio.wait(list(self._runs.values()), timeout=1.0)
        await cancel_and_wait(*self._runs.values())
        await self._watches.close()

    def _start(self, name: str, work: Any) -> None:
        task = self._runs[name] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._runs.pop(name, None))

    def _ticket(
        self, tenant: str, stored: StoredResponse, request: ResponseRequest, question: Question, *, following: bool
    ) -> BackgroundTicket:
        return BackgroundTicket(
            self._shelves, self._watches, tenant, stored, request, question.model, question.options, following=following
        )

    async def _take_over(self, name: str) -> None:
        tenant, response_id = of_watch(name)
        try:
            stored = await self._shelves.responses.get(tenant, response_id)
        except NotFound:
            return await self._watches.drop(name)
        except BrokerUnavailable:
            return
        if stored.response["status"] not in RUNNING or stored.job is None:
            return await self._watches.drop(name)
        try:
            generation, ticket = await self.follow(tenant, stored)
        except GatewayError as error:
            if time.time() > stored.job.until + _GRACE:
                await self._fail(tenant, stored, error)
            return  # its model may come back: somebody looks again when the hold has passed
        log.info("a background response is taken over", response=response_id)
        await self._see_through(generation, ticket, name, None)

    async def _see_through(
        self, generation: Generation, ticket: BackgroundTicket, name: str, entered: asyncio.Future[None] | None
    ) -> None:
        try:
            async with generation:
                if entered is not None:
                    entered.set_result(None)
                async for _ in generation.deltas():
                    pass
        except GatewayError as error:
            if entered is not None and not entered.done():
                return entered.set_exception(error)
            if ticket.following and isinstance(error, StreamNotFound | DeadlineExpired):
                with suppress(BrokerUnavailable):
                    await ticket.lost(error)
        except Exception as error:
            log.exception("a background response failed", name=name)
            if entered is not None and not entered.done():
                entered.set_exception(error)
        finally:
            if not generation.over:
                with suppress(BrokerUnavailable):
                    await self._watches.free(name)

    async def _fail(self, tenant: str, stored: StoredResponse, error: GatewayError) -> None:
        response_id = stored.response["id"]

        def change(now: StoredResponse) -> StoredResponse | None:
            found = now.response
            return now.with_response(response.failed(found, error)) if found["status"] in RUNNING else None

        with suppress(BrokerUnavailable):
            await self._shelves.responses.change(tenant, response_id, change)
            await self._watches.drop(watch_name(tenant, response_id))


def _request_id(response_id: str) -> str:
    """The name of its request on the queue."""
    return response_id.removeprefix(ids.RESPONSE) + "-0"
