"""Start-time fair queueing in tokens, between the classes and between the tenants of each: all tags and virtual times.

Every account says up to when, in virtual time, its owner has been served. Knows nothing of engines and room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.engine.wire.reference.requests import Request

CLASS_WEIGHTS = {"priority": 8, "default": 4, "flex": 1, "batch": 1}

Line = tuple[str, str]
"""A class and a tenant: those of its requests that wait in that class."""


def line_of(request: Request) -> Line:
    return request.service_class, request.tenant


@dataclass
class Turns:
    """Weights are powers of two in these tests, so that floats are exact and every tie is a tie."""

    class_time: float = 0.0
    class_served: dict[str, float] = field(default_factory=dict)
    time: dict[str, float] = field(default_factory=dict)  # by class
    served: dict[Line, float] = field(default_factory=dict)
    start: dict[Line, float] = field(default_factory=dict)  # when each line's first request may begin
    passed: dict[str, int] = field(default_factory=dict)  # taken since the oldest of a class was

    def time_in(self, service_class: str) -> float:
        return self.time.get(service_class, 0.0)

    def class_start(self, service_class: str) -> float:
        """When the class has its next turn."""
        return max(self.class_time, self.class_served.get(service_class, 0.0))

    def join(self, request: Request) -> None:
        """Its tenant has a line from now on, at its account's place, but not in the past."""
        line = line_of(request)
        self.start.setdefault(line, max(self.time_in(line[0]), self.served.get(line, 0.0)))

    def charge(self, request: Request, *, in_turn: bool) -> None:
        """It is taken. Who is taken because it has waited for so long does not move the virtual time."""
        line, service_class = line_of(request), request.service_class
        begun = self.start[line]
        self.start[line] = self.served[line] = begun + request.tokens / request.weight
        if in_turn:
            self.time[service_class] = max(self.time_in(service_class), begun)
        self.class_time = self.class_start(service_class)
        self.class_served[service_class] = self.class_time + request.tokens / CLASS_WEIGHTS[service_class]

    def refund(self, request: Request, tokens: int) -> None:
        """Give back tokens that it was charged with; its tenant's waiting line moves up, but not into the past."""
        line, service_class = line_of(request), request.service_class
        self.served[line] = self.served.get(line, self.time_in(service_class)) - tokens / request.weight
        if service_class in self.class_served:
            self.class_served[service_class] -= tokens / CLASS_WEIGHTS[service_class]
        if line in self.start:
            self.start[line] = min(self.start[line], max(self.served[line], self.time_in(service_class)))

    def correct(self, request: Request, generated: int) -> None:
        """It ended: what it was charged with becomes what it used. An account in the past says nothing any more."""
        self.refund(request, request.tokens - request.prompt - generated)

    def forget_past(self, line: Line) -> None:
        if self.served[line] <= self.time_in(line[0]):
            del self.served[line]

    def rejoin(self, request: Request) -> None:
        """It returns to its line as if it had never been taken, in the past too."""
        self.refund(request, request.tokens)
        self.start[line_of(request)] = self.served[line_of(request)]
