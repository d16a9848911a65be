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
    `max_passed`: how many others may pass the one that has waited longest in its class."""

    lookahead: int
    max_age: int
    max_passed: int


@dataclass
class Claim:
    """`slots` and `blocks` are what each class may use up, by rank; what is taken uses up that of all of them."""

    waiting: list[Request]
    turns: Turns
    slots: Sequence[int]
    blocks: Sequence[int]
    rules: Rules
    now: int
    holds_nothing: bool
    taken: list[Request] = field(default_factory=list)
    closed: bool = False  # the first that does not fit has waited for too long: nobody passes it
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
            return self.holds_nothing and not self.taken
        return False
