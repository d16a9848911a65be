"""What limits say to a client: OpenAI's x-ratelimit headers, and the errors of a request that is not let in.

Knows ADMIT's reply and no store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from noria.gateway.errors import RateLimited
from noria.gateway.tenancy.limits import NANO, WAITING, Bounds, Meter
from noria.gateway.tenancy.principal import Principal

GATE_RETRY = 0.25
"""Seconds after which a request that waits for others to end is worth another try: nobody knows when they do."""


class TokensLimited(RateLimited):
    type = "tokens"


class TooLarge(TokensLimited):
    """More than the whole limit: no waiting helps."""

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class QuotaExceeded(RateLimited):
    """The budget is used up until its period ends."""

    type = "insufficient_quota"
    code = "insufficient_quota"

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class State:
    """Where a meter stands: what is left of it, and the milliseconds until it is full again."""

    meter: Meter
    remaining: int
    reset: int


@dataclass(frozen=True, slots=True)
class Reply:
    """ADMIT's answer; see the script."""

    what: str
    which: int
    wait: float  # seconds
    granted: int | None
    states: Sequence[State]

    def may_turn(self, bounds: Bounds) -> bool:
        """Whether it may be a refusal only because what has happened is not on the books yet: a request that ended has
        left its place and gives tokens back, but it stays a request."""
        if self.what == "meter":
            return bounds.meters[self.which - 1].rate.kind != "r"
        return self.what in ("gate", "held")


def read_reply(reply: Sequence[bytes | int], bounds: Bounds) -> Reply:
    what, which, wait, granted = str(reply[0], "ascii") if isinstance(reply[0], bytes) else "", *reply[1:4]
    numbers = [int(number) for number in reply[4:]]
    states = [State(meter, numbers[2 * place], numbers[2 * place + 1]) for place, meter in enumerate(bounds.meters)]
    return Reply(what, int(which), int(wait) / 1000, None if int(granted) < 0 else int(granted), states)


def headers(reply: Reply, project_id: str) -> dict[str, str]:
    """Of several limits of one kind the one with the least left speaks. Tokens of a project are also told apart."""
    found: dict[str, str] = {}
    _tell(found, "requests", reply.states, lambda m: m.rate.kind == "r")
    _tell(found, "tokens", reply.states, lambda m: m.rate.kind != "r")
    _tell(found, "project-tokens", reply.states, lambda m: m.rate.kind == "t" and m.subject == project_id)
    if reply.granted is not None:
        found["x-noria-granted-tokens"] = str(reply.granted)
    return found


def _tell(found: dict[str, str], name: str, states: Sequence[State], belongs: Callable[[Meter], bool]) -> None:
    told = min((s for s in states if belongs(s.meter)), key=lambda s: (s.remaining, -s.reset), default=None)
    if told is not None:
        found[f"x-ratelimit-limit-{name}"] = str(told.meter.limit)
        found[f"x-ratelimit-remaining-{name}"] = str(told.remaining)
        found[f"x-ratelimit-reset-{name}"] = duration(told.reset)


def duration(milliseconds: int) -> str:
    """As Go writes durations, which OpenAI does: `0s`, `120ms`, `8.64s`, `6m0s`, `1h2m3.5s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def refusal(reply: Reply, bounds: Bounds, principal: Principal, model: str, asked: Mapping[str, int]) -> RateLimited:
    """The error for a request that was not let in; `asked` is what it asks of each kind of meter."""
    where = f"for {model} in organization {principal.organization.id}"
    place = reply.which - 1
    if reply.what == "gate":
        gate = bounds.gates[place]
        what, when = ("queued", "is taken up") if gate.kind == WAITING else ("concurrent", "has ended")
        message = f"Rate limit reached {where} on {what} requests: Limit {gate.limit}."
        return RateLimited(f"{message} Please try again when one {when}.", retry_after=GATE_RETRY)
    if reply.what in ("spent", "held"):
        check = bounds.budgets[place]
        limit = check.limit if check.budget.unit == "tokens" else check.limit / NANO
        budget = f"{limit:g} {check.budget.unit} per {check.budget.period}"
        if reply.what == "spent":
            message = f"You exceeded your current quota ({budget}). Please check your plan and billing details."
            return QuotaExceeded(message)
        message = f"What is left of your quota ({budget}) is reserved by requests that run. Please try again."
        return TokensLimited(message, retry_after=GATE_RETRY)
    state = reply.states[place]
    meter, used = state.meter, state.meter.limit - state.remaining
    kind = "Request too large" if reply.what == "large" else "Rate limit reached"
    message = f"{kind} {where} on {meter.rate.words}: Limit {meter.limit}"
    requested = f"Requested {asked[meter.rate.kind]}"
    if reply.what == "large":
        return TooLarge(f"{message}, {requested}. The input or output tokens must be reduced.")
    message = f"{message}, Used {used}, {requested}. Please try again in {duration(round(reply.wait * 1000))}."
    refused = RateLimited if meter.rate.kind == "r" else TokensLimited
    return refused(message, retry_after=reply.wait)
