"""Answers whose client has gone but may come back, to this gateway or another: kept going for a while.

Also tells the store in the background what became of an answer that others may ask for. Knows no frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from noria.engine.wire.broker import BrokerUnavailable
from noria.engine.wire.messages import TokenFrame
from noria.gateway.errors import GatewayError
from noria.gateway.pump import FramePump
from noria.gateway.tickets import Ticket


class Unattended(Protocol):
    """What can go on without a client."""

    def deltas(self) -> AsyncIterator[Any]: ...

    def close(self) -> None: ...

    def leave(self) -> None: ...


class Lingering:
    """One per gateway process. `window` is in seconds."""

    def __init__(self, pump: FramePump, window: float) -> None:
        self._pump = pump
        self._window = window
        self._tasks: dict[asyncio.Task[None], Unattended] = {}

    def adopt(self, answer: Unattended, ticket: Ticket) -> None:
        """Read on, so that stop strings are found; cancel it once nobody has been there for the window."""
        task = asyncio.ensure_future(self._attend(answer, ticket))
        self._tasks[task] = answer
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def keep(self, ticket: Ticket, answer: Sequence[TokenFrame]) -> None:
        self._pump.errand("keeping an answer", lambda: ticket.keep(answer))

    def lose(self, ticket: Ticket, error: GatewayError | None) -> None:
        self._pump.errand("forgetting an answer", lambda: ticket.lost(error))

    def present(self, ticket: Ticket) -> Callable[[], None]:
        """From now on everybody knows that a client is attached here, until what is returned is called, and for the
        window after that."""
        marking = asyncio.ensure_future(self._mark(ticket))

        def end() -> None:
            marking.cancel()
            self._pump.errand("presence", lambda: ticket.mark_present(self._window))

        return end

    async def stop(self) -> None:
        """The gateway ends: leave all answers to themselves."""
        for task, answer in list(self._tasks.items()):
            task.cancel()
            answer.leave()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _mark(self, ticket: Ticket) -> None:
        while True:
            with suppress(BrokerUnavailable):
                await ticket.mark_present(self._window)
            await asyncio.sleep(self._window / 3)

    async def _attend(self, answer: Unattended, ticket: Ticket) -> None:
        reading = asyncio.ensure_future(_read_out(answer))
        present = True
        try:
            with suppress(BrokerUnavailable):
                await ticket.mark_present(self._window)
            while present and not reading.done():
                await asyncio.wait((reading,), timeout=min(1.0, self._window / 4))
                with suppress(BrokerUnavailable):  # nobody can come back meanwhile, and nothing can be cancelled
                    present = await ticket.somebody_present()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        answer.close()


async def _read_out(answer: Unattended) -> None:
    with suppress(GatewayError):
        async for _ in answer.deltas():
            pass
