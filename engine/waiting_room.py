"""Where claimed requests wait for their grammars and adapters, beside the running batch.

Knows no scheduler and no queue: the loop asks who is ready.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import structlog

from noria.engine.adapters import refusal
from noria.engine.grammar.binding import GrammarError, GrammarsUnavailable
from noria.engine.grammar.grammars import Grammars
from noria.engine.grammar.matcher import CompiledGrammar
from noria.engine.live import LiveRequest
from noria.engine.wire.messages import Grammar

log = structlog.get_logger("noria.engine")


@dataclass(frozen=True, slots=True)
class Guest:
    """A request that waits, for one or both. `until` (monotonic) its grammar's turn has to come; from then on that has
    its own limit."""

    live: LiveRequest
    grammar: Grammar | None
    compiled: Future[CompiledGrammar] | None
    adapter: Future[str] | None
    until: float

    @property
    def awaited(self) -> list[Future[Any]]:
        """What is not there yet."""
        return [f for f in (self.compiled, self.adapter) if f is not None and not f.done()]

    def must_go(self, now: float) -> bool:
        if self.adapter is not None and not self.adapter.done():
            return False
        late = self.compiled is not None and now > self.until and not self.compiled.running()
        return not self.awaited or late


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request cannot run. `param` is the client's field that is at fault, None where it is not the client.
    `busy`: it may run at another time."""

    message: str
    param: str | None = None
    busy: bool = False


class WaitingRoom:
    """Holds `capacity` requests at most; the caller looks at `free` before it claims more."""

    def __init__(self, grammars: Grammars, capacity: int) -> None:
        self._grammars = grammars
        self._capacity = capacity
        self._guests: dict[str, Guest] = {}  # by the scheduler's id

    def __len__(self) -> int:
        return len(self._guests)

    @property
    def free(self) -> int:
        return self._capacity - len(self._guests)

    def enter(self, live: LiveRequest, adapter: Future[str] | None) -> None:
        """Wait for the grammar that the request has, if any, and for its adapter, if that is still to come."""
        grammar, until = live.claimed.request.sampling.grammar, time.monotonic() + self._grammars.patience
        compiled = None if grammar is None else self._grammars.compile(grammar)
        self._guests[live.scheduled.id] = Guest(live, grammar, compiled, adapter, until)

    def leave(self, live: LiveRequest) -> bool:
        """The request waits no more. False if it did not."""
        guest = self._guests.pop(live.scheduled.id, None)
        if guest is not None:
            self._give_up(guest.compiled)
        return guest is not None

    def ready(self) -> list[tuple[LiveRequest, Refusal | None]]:
        """Take out, in the order of their coming, those who have what they need, and those that must end instead."""
        now = time.monotonic()
        ready = [guest for guest in self._guests.values() if guest.must_go(now)]
        for guest in ready:
            del self._guests[guest.live.scheduled.id]
        settled = [(guest.live, _settle(guest)) for guest in ready]
        for guest in ready:
            self._give_up(guest.compiled)
        return settled

    def wait(self, seconds: float) -> None:
        """Sleep until somebody may be ready."""
        awaited = [future for guest in self._guests.values() for future in guest.awaited]
        if awaited:
            wait(awaited, seconds, FIRST_COMPLETED)

    def _give_up(self, compiled: Future[CompiledGrammar] | None) -> None:
        """A turn of those that wait is not spent on what nobody waits for any more; one that has come goes on."""
        if compiled is not None and all(guest.compiled is not compiled for guest in self._guests.values()):
            compiled.cancel()


def _settle(guest: Guest) -> Refusal | None:
    if guest.adapter is not None and (why := refusal(guest.adapter)) is not None:
        return Refusal(why)
    if guest.compiled is None or guest.grammar is None:
        return None
    if not guest.compiled.done():
        return Refusal("Too many grammars are being compiled at the moment.", busy=True)
    try:
        guest.live.follow(guest.compiled.result())
    except GrammarError as error:
        return Refusal(str(error), guest.grammar.param)
    except GrammarsUnavailable as error:
        log.error("a grammar cannot be compiled here", error=str(error))
        return Refusal(str(error))
    except Exception:
        log.exception("a grammar could not be compiled", kind=guest.grammar.kind)
        return Refusal("the grammar could not be compiled")
    return None
