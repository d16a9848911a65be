"""One claim: which of the waiting requests an engine takes, in which order, and which of them it only looks at.

Knows the pool's requests and turns; not how they are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.engine.wire.messages import CLASSES
from tests.engine.wire.reference.requests import Request
from tests.engine.wire.reference.turns import Line, Turns, line_of


@dataclass(frozen=True)
class Rules:
    """`lookahead`: how many may be looked at past one that does not fit. `max_age`: ms for which others may pass it.
    `max_passed`: how many others may pass the one that has waited longest in its class. `max_left`: ms for which a
    request may be left to engines that hold less."""

    lookahead: int
    max_age: int
    max_passed: int
    max_left: int


@dataclass(frozen=True)
class Standing:
    """What an engine said at its last claim: what it holds, and the room that it has for any class."""

    held: int
    slots: int
    blocks: int

    def places(self, request: Request) -> int:
        """How many such requests it could take."""
        return min(self.slots, self.blocks // max(1, request.cost))


@dataclass
class Claim:
    """`slots` and `blocks` are what each class may use up, by rank; what is taken uses up that of all of them."""

    waiting: list[Request]
    turns: Turns
    slots: Sequence[int]
    blocks: Sequence[int]
    rules: Rules
    now: int
    num_held: int
    others: Sequence[Standing]
    taken: list[Request] = field(default_factory=list)
    closed: bool = False  # the first that does not fit has waited for too long: nobody passes it; or `left`
    left: bool = False  # others should take the next one and all the rest
    _looked_at: set[str] = field(default_factory=set)
    _misfits: Counter[str] = field(default_factory=Counter)  # by class
    _skipped: dict[Line, float] = field(default_factory=dict)  # the cost of those that did not fit

    def try_suspects(self) -> Request | None:
        """The first suspect that fits, by class and arrival."""
        suspects = sorted((r for r in self.waiting if r.suspect), key=lambda r: r.rank)
        for i, request in enumerate(suspects[: self.rules.lookahead + 1]):
            if self.closed or not self._has_room(request.service_class):
                continue
            if self._fits(request) or (i == 0 and self._insists(request)):
                self.taken.append(request)
                return request
        return None

    def take_turns(self) -> None:
        """Requests of the class whose turn it is, until there is no room or nothing that may be taken."""
        while not self.closed:
            open_classes = [c for c in CLASSES if self._is_open(c)]
            if not open_classes:
                return
            self._consider(min(open_classes, key=self.turns.class_start))  # the more urgent of equals

    def _is_open(self, service_class: str) -> bool:
        may_look = self._misfits[service_class] <= self.rules.lookahead
        return may_look and self._has_room(service_class) and bool(self._left(service_class))

    def _left(self, service_class: str) -> list[Request]:
        mine = (r for r in self.waiting if r.queued and r.service_class == service_class)
        return [r for r in mine if r.id not in self._looked_at and r not in self.taken]

    def _consider(self, service_class: str) -> None:
        queue = [r for r in self.waiting if r.queued and r.service_class == service_class and r not in self.taken]
        oldest = min(queue, key=lambda r: r.arrival)
        overdue = self.turns.passed.get(service_class, 0) >= self.rules.max_passed and oldest.id not in self._looked_at
        request = oldest if overdue else min(self._left(service_class), key=self._turn)
        self._looked_at.add(request.id)
        if self._fits(request):
            if self._should_leave(request):
                self.closed = self.left = True
                return
            self._take(request, is_oldest=request is oldest, in_turn=not overdue)
            return
        self._misfits[service_class] += 1
        if self._misfits[service_class] == 1 and self._insists(request):
            self._take(request, is_oldest=request is oldest, in_turn=not overdue)
        elif not overdue:  # those behind it wait as long as if it had been taken
            line = line_of(request)
            self._skipped[line] = self._skipped.get(line, 0.0) + request.tokens / request.weight

    def _turn(self, request: Request) -> tuple[float, str, tuple[int, int]]:
        line = line_of(request)
        return self.turns.start[line] + self._skipped.get(line, 0.0), request.tenant, request.place

    def _take(self, request: Request, *, is_oldest: bool, in_turn: bool) -> None:
        self.turns.charge(request, in_turn=in_turn)
        service_class = request.service_class
        self.turns.passed[service_class] = 0 if is_oldest else self.turns.passed.get(service_class, 0) + 1
        self.taken.append(request)

    def _room(self, service_class: str) -> tuple[int, int]:
        rank = CLASSES.index(service_class)
        used = sum(r.cost for r in self.taken)
        return self.slots[rank] - len(self.taken), self.blocks[rank] - used

    def _has_room(self, service_class: str) -> bool:
        return min(self._room(service_class)) > 0

    def _fits(self, request: Request) -> bool:
        return request.cost <= self._room(request.service_class)[1]

    def _insists(self, request: Request) -> bool:
        """The first that does not fit: it is noted when that began. Once nobody may pass it, an engine that holds
        nothing takes it all the same: it has offered all it has."""
        if request.misfit_since is None:
            request.misfit_since = self.now
        elif self.now - request.misfit_since >= self.rules.max_age:
            self.closed = True
            return not self.num_held and not self.taken
        return False

    def standing(self) -> Standing:
        """What the engine says of itself after this claim."""
        slots, blocks = self._room(CLASSES[-1])
        return Standing(self.num_held + len(self.taken), max(0, slots), max(0, blocks))

    def _should_leave(self, request: Request) -> bool:
        """Whether those that hold less, beside whom somebody would not have to give way, can take all that waits
        before they hold as much."""
        waiting = [r for r in self.waiting if r not in self.taken]
        heads = [min(of_class, key=lambda r: r.arrival) for c in CLASSES if (of_class := _in_class(waiting, c))]
        if any(self.now - head.since >= self.rules.max_left for head in heads):
            return False
        mine = self.standing()
        level = mine.held if mine.places(request) else 10**9
        places = sum(max(0, min(other.places(request), level - other.held)) for other in self.others)
        return len(waiting) <= places


def _in_class(requests: Sequence[Request], service_class: str) -> list[Request]:
    return [r for r in requests if r.queued and r.service_class == service_class]
