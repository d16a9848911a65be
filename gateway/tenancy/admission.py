"""The way in for one HTTP request of a stored key: what it may not, it is told; what it may use, it reserves.

Knows principals, limits and the books; no queue and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from noria.engine.wire.connection import BrokerUnavailable, StoreFault
from noria.gateway.errors import InvalidRequest
from noria.gateway.tenancy import answers
from noria.gateway.tenancy.books import HOLD_MS, Books
from noria.gateway.tenancy.limits import WAITING, Bounds, Tariff, bounds, output_cap, output_room
from noria.gateway.tenancy.principal import Principal

log = structlog.get_logger(__name__)

Again = Callable[[], Awaitable[Principal]]


@dataclass(slots=True)
class Caller:
    """Who makes one HTTP request. `again` looks the key up afresh. `headers` is what its answer says of limits; filled
    when it is let in, or refused."""

    principal: Principal
    again: Again
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """One request on a queue: its id, and the tokens that it may use at most."""

    id: str
    input: int
    output: int


class Admission:
    """Of one HTTP request, whose parts all have ids that begin with `group`. Those of batches (`in_batch`) wait for
    room by themselves: for them only budgets hold. With `fail_open` a request is let in where the limits cannot be
    asked; `unavailable` is called with what became of one."""

    def __init__(
        self,
        books: Books,
        caller: Caller,
        model: str,
        pool: str,
        group: str,
        parts: Sequence[Part],
        *,
        in_batch: bool,
        fail_open: bool,
        unavailable: Callable[[str], None],
    ) -> None:
        self._books = books
        self._caller = caller
        self._model, self._pool = model, pool
        self._group = group
        self._parts = parts
        self._in_batch = in_batch
        self._fail_open = fail_open
        self._unavailable = unavailable
        self._bounds: Bounds | None = None  # what was reserved under

    async def admit(self) -> int | None:
        """Reserve. Returns the output tokens that each part may have, where a budget does not pay for all that it may
        use; else None. Raises `RateLimited`, `InvalidKey`, `Forbidden`, and BrokerUnavailable."""
        try:
            await self._books.register(self._pool)
            return await self._reserve()
        except (BrokerUnavailable, StoreFault) as error:
            self._unavailable("admitted" if self._fail_open else "refused")
            if not self._fail_open:
                raise
            log.warning("a request is let in without its limits", reason=str(error))
            return None

    async def withdraw(self, part_ids: Sequence[str]) -> None:
        """These were never put on a queue."""
        if self._bounds is not None and part_ids:
            await self._books.withdraw(self._caller.principal.organization.id, self._group, part_ids)

    def over(self) -> None:
        """The request ends about now."""
        self._books.nudge()

    async def _reserve(self) -> int | None:
        tried = False
        for _ in range(4):
            principal = self._caller.principal
            found = bounds(principal, self._model, time.time(), in_batch=self._in_batch)
            if not found.any:
                return None
            reply = await self._ask(principal, found)
            if reply is None:  # the directory has changed since the key was looked up
                self._caller.principal = await self._caller.again()
                continue
            self._caller.headers.update(answers.headers(reply, principal.project.id))
            if reply.what == "in":
                self._bounds = found
                return reply.granted
            if tried or not reply.may_turn(found):
                raise answers.refusal(reply, found, principal, self._model, self._asked(reply.granted))
            tried = True
            await self._catch_up(reply, found)
        raise BrokerUnavailable("the directory changes all the time")

    def _asked(self, granted: int | None) -> dict[str, int]:
        """By kind of meter. A budget that grants less has shortened the output before the meters are asked."""
        outputs = (part.output if granted is None else min(part.output, granted) for part in self._parts)
        tokens_in, tokens_out = sum(part.input for part in self._parts), sum(outputs)
        return {"r": 1, "i": tokens_in, "o": tokens_out, "t": tokens_in + tokens_out}

    async def _catch_up(self, reply: answers.Reply, found: Bounds) -> None:
        """Bring onto the books what has happened: ends, and where a queue is full, claims."""
        await self._books.post((self._pool,))
        if reply.what == "gate" and (gate := found.gates[reply.which - 1]).kind == WAITING:
            await self._books.note_claimed(self._caller.principal.organization.id, gate)

    async def _ask(self, principal: Principal, found: Bounds) -> answers.Reply | None:
        tariff = await self._books.tariff(self._model, self._pool) if found.budgets else Tariff()
        spec = (
            self._group,
            principal.version,
            HOLD_MS,
            self._pool,
            [(part.id, part.input, part.output) for part in self._parts],
            [meter.packed() for meter in found.meters],
            [gate.packed() for gate in found.gates],
            [check.packed() for check in found.budgets],
            (tariff.input, tariff.output),
        )
        reply = await self._books.admit(principal.organization.id, spec)
        return None if reply[0] == b"stale" else answers.read_reply(reply, found)


def output_limit(
    principal: Principal, model: str, wanted: int, num_input: int, num_choices: int, *, is_explicit: bool
) -> int:
    """Output tokens of each choice. Raises `InvalidRequest` where the client asked for more than is allowed; what it
    did not ask for is cut to what its limits could ever let in."""
    cap = output_cap(principal, model)
    if cap is not None and wanted > cap:
        if is_explicit:
            message = f"Invalid 'max_tokens': integer above maximum value. Expected a value <= {cap}, but got {wanted}."
            raise InvalidRequest(message, param="max_tokens", code="integer_above_max_value")
        wanted = cap
    if not is_explicit:
        room = output_room(bounds(principal, model, 0.0).meters, num_input, num_choices)
        wanted = wanted if room is None else min(wanted, room)
    return wanted
