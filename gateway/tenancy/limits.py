"""Which limits and budgets hold for a request: as the meters, gates and budgets that ADMIT checks in one go.

Knows principals and periods; no store, no header.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from noria.gateway.tenancy.principal import Principal, Subject
from noria.gateway.tenancy.records import Budget, Price

MINUTE, DAY = 60_000, 86_400_000
NANO = 1_000_000_000
"""Money is counted in billionths of a US dollar, in whole numbers."""

EXACT = 2**53 - 1
"""Up to here the store's scripts, whose numbers are doubles, count exactly."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One kind of limit over time. `kind`: r(equests), t(okens), i(nput) or o(utput tokens)."""

    attribute: str
    kind: str
    period: int  # milliseconds
    words: str

    @property
    def field(self) -> str:
        return self.kind + ("m" if self.period == MINUTE else "d")


RATES = (
    Rate("requests_per_minute", "r", MINUTE, "requests per min (RPM)"),
    Rate("requests_per_day", "r", DAY, "requests per day (RPD)"),
    Rate("tokens_per_minute", "t", MINUTE, "tokens per min (TPM)"),
    Rate("tokens_per_day", "t", DAY, "tokens per day (TPD)"),
    Rate("input_tokens_per_minute", "i", MINUTE, "input tokens per min"),
    Rate("input_tokens_per_day", "i", DAY, "input tokens per day"),
    Rate("output_tokens_per_minute", "o", MINUTE, "output tokens per min"),
    Rate("output_tokens_per_day", "o", DAY, "output tokens per day"),
)


@dataclass(frozen=True, slots=True)
class Meter:
    subject: str
    field: str
    rate: Rate
    limit: int

    def packed(self) -> tuple[str, str, str, int, int]:
        return self.subject, self.field, self.rate.kind, self.limit, self.rate.period


@dataclass(frozen=True, slots=True)
class Gate:
    """How many requests may be on one side of it."""

    kind: str
    subject: str
    limit: int

    def packed(self) -> tuple[str, int]:
        return f"{self.kind}:{self.subject}", self.limit


@dataclass(frozen=True, slots=True)
class BudgetCheck:
    """`limit` is in tokens or billionths of a dollar."""

    subject: str
    period: str
    budget: Budget
    limit: int

    @property
    def field(self) -> str:
        return f"{self.subject}:{self.budget.unit}"

    def packed(self) -> tuple[str, str, str, int]:
        return self.period, self.field, self.budget.unit, self.limit


@dataclass(frozen=True, slots=True)
class Bounds:
    """All that holds for one request. Requests of batches wait for room by themselves: for them only budgets hold."""

    meters: Sequence[Meter]
    gates: Sequence[Gate]
    budgets: Sequence[BudgetCheck]

    @property
    def any(self) -> bool:
        return bool(self.meters or self.gates or self.budgets)


RUNNING, WAITING = "running", "waiting"
"""Kinds of gates: how many requests may be there at a time, and how many of them may still be in the queue."""


def bounds(principal: Principal, model: str, now: float, *, in_batch: bool = False) -> Bounds:
    meters, gates = [], []
    for subject in () if in_batch else principal.subjects:
        for suffix, rates in subject.rates(model):
            for rate in RATES:
                limit = getattr(rates, rate.attribute)
                if limit is not None:
                    meters.append(Meter(subject.id, rate.field + suffix, rate, limit))
            if rates.concurrent_requests is not None:
                gates.append(Gate(RUNNING, subject.id + suffix, rates.concurrent_requests))
            if rates.queued_requests is not None:
                gates.append(Gate(WAITING, subject.id + suffix, rates.queued_requests))
    checks = [check for subject in principal.subjects for check in budget_checks(subject, now)]
    return Bounds(meters, gates, checks)


def budget_checks(subject: Subject, now: float) -> list[BudgetCheck]:
    return [
        BudgetCheck(subject.id, period_of(budget.period, now), budget, amount(budget)) for budget in subject.budgets
    ]


def amount(budget: Budget) -> int:
    return min(EXACT, math.floor(budget.limit * (NANO if budget.unit == "usd" else 1)))


def period_of(period: str, now: float) -> str:
    """Names the day or month (UTC) of a moment."""
    at = datetime.fromtimestamp(now, UTC)
    return f"day:{at:%Y-%m-%d}" if period == "day" else f"month:{at:%Y-%m}"


def output_cap(principal: Principal, model: str) -> int | None:
    """The least `max_tokens` of all that hold."""
    caps = [r.max_tokens for s in principal.subjects for _, r in s.rates(model) if r.max_tokens is not None]
    return min(caps, default=None)


def output_room(meters: Sequence[Meter], num_input: int, num_choices: int) -> int | None:
    """Output tokens of each choice that fit under the whole of every limit: a request that asks for none of its own
    accord must not ask for more than it could ever have. None: no limit."""
    rooms = [(m.limit - (num_input if m.rate.kind == "t" else 0)) // num_choices for m in meters if m.rate.kind in "to"]
    return max(1, min(rooms)) if rooms else None


@dataclass(frozen=True, slots=True)
class Tariff:
    """Of one model, in billionths of a dollar per token."""

    input: int = 0
    cached_input: int = 0
    output: int = 0

    @classmethod
    def of(cls, price: Price) -> Tariff:
        cached = price.input if price.cached_input is None else price.cached_input
        return cls(_nano(price.input), _nano(cached), _nano(price.output))

    def cost(self, prompt: int, cached: int, output: int) -> int:
        return (prompt - cached) * self.input + cached * self.cached_input + output * self.output


def _nano(per_million: float) -> int:
    return round(per_million * NANO / 1_000_000)
