"""/v1/admin: the turning wheel, the queues with their engines, and dead letters, for whoever runs the place.

Knows no scheduling and no tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from noria.engine.wire.broker import QueueFull
from noria.engine.wire.queue_view import DeadLetter, NoSuchLetter, QueueView, open_view
from noria.gateway.dependencies import ServicesDep, operate
from noria.gateway.endpoints.listing import json, listed
from noria.gateway.errors import NotFound, Overloaded, WrongState
from noria.gateway.schemas.operations import shown_letter, shown_pool
from noria.gateway.wheel import WheelFeed

T = TypeVar("T")

router = APIRouter(prefix="/admin", dependencies=[Depends(operate)])

_KEEP_ALIVE = 1.0
"""Seconds between comments while there is no news; an end of the server is noticed as soon."""


@router.get("/wheel")
async def watch_wheel(request: Request, services: ServicesDep) -> Response:
    """Server-sent events, 20 a second at most for each engine: its latest iterations, row by row."""
    feed: WheelFeed = request.app.state.wheel
    if feed.is_full:
        raise Overloaded("Too many watch the wheel already.", retry_after=5)

    async def events() -> AsyncIterator[bytes]:
        async with feed.watch() as news:
            while not services.drain.begun:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE):
                        message = await news.get()
                except TimeoutError:
                    yield b": no news\n\n"
                else:
                    yield b"data: " + message + b"\n\n"

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


@router.get("/queues")
async def list_queues(services: ServicesDep) -> Response:
    """Every model's queue: what waits by class and tenant, and the engines with their leases and figures."""
    pools = await _look(services.settings.redis_url, QueueView.pools)
    return listed([{"object": "queue", "id": pool.model, **shown_pool(pool)} for pool in pools], more=False)


@router.get("/dead_letters")
async def list_dead_letters(services: ServicesDep) -> Response:
    """Requests that were given up, the newest first for each model."""
    letters = await _look(services.settings.redis_url, QueueView.dead_letters)
    return listed([{"object": "dead_letter", **shown_letter(letter)} for letter in letters], more=False)


@router.get("/dead_letters/{letter_id}")
async def retrieve_dead_letter(letter_id: str, services: ServicesDep) -> Response:
    """One of them whole, its prompt included."""
    letter = await _look(services.settings.redis_url, _finding(letter_id))
    return json({"object": "dead_letter", **shown_letter(letter, whole=True)})


@router.post("/dead_letters/{letter_id}/requeue")
async def requeue_dead_letter(letter_id: str, services: ServicesDep) -> Response:
    """Give it to the engines once more, with all its attempts."""

    def requeue(view: QueueView) -> None:
        asyncio.run(view.requeue(_finding(letter_id)(view)))

    try:
        await _look(services.settings.redis_url, requeue)
    except ValueError as error:
        raise WrongState(str(error)) from None
    except QueueFull as error:
        raise Overloaded(str(error), retry_after=error.retry_after) from None
    return json({"object": "dead_letter.requeued", "id": letter_id, "requeued": True})


@router.delete("/dead_letters/{letter_id}")
async def delete_dead_letter(letter_id: str, services: ServicesDep) -> Response:
    """Drop it for good."""
    await _look(services.settings.redis_url, lambda view: view.drop(_finding(letter_id)(view)))
    return json({"object": "dead_letter.deleted", "id": letter_id, "deleted": True})


def _finding(letter_id: str) -> Callable[[QueueView], DeadLetter]:
    def find(view: QueueView) -> DeadLetter:
        try:
            return view.find(letter_id)
        except NoSuchLetter:
            raise NotFound(f"No dead letter has the id '{letter_id[:128]}'.", param="letter_id") from None

    return find


async def _look(redis_url: str, at: Callable[[QueueView], T]) -> T:
    """A look of a connection of its own, beside the event loop: the reader is made for the command line."""

    def look() -> T:
        with open_view(redis_url) as view:
            return at(view)

    return await asyncio.to_thread(look)
