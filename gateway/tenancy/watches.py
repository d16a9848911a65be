"""What is watched while usage is posted: budgets of which a share, or all, is used for the first time.

Knows budgets and the shape of an event; no store.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import orjson

from noria.gateway.tenancy.limits import BudgetCheck, budget_checks
from noria.gateway.tenancy.principal import ORGANIZATION, Subject
from noria.gateway.tenancy.records import ApiKey, Organization, Project


@dataclass(frozen=True, slots=True)
class Watch:
    """`share` of a budget: at 1 it is used up."""

    check: BudgetCheck
    share: float

    @property
    def amount(self) -> int:
        return math.ceil(self.check.limit * self.share)

    def told(self) -> dict[str, Any]:
        budget = self.check.budget
        return {
            "subject": self.check.subject,
            "period": self.check.period,
            "unit": budget.unit,
            "limit": budget.limit,
            "share": self.share,
        }

    def packed(self) -> tuple[str, str, int, str]:
        event = "budget.exhausted" if self.share >= 1 else "budget.threshold"
        project = self.check.subject if self.check.subject.startswith("proj_") else None
        entry = {
            "type": event,
            "effective_at": int(time.time()),
            "actor": {"type": "ledger", "id": "ledger", "address": None},
            "project": project,
            "before": {},
            "after": {"budget": {"id": self.check.subject, **self.told()}},
        }
        return self.check.period, self.check.field, self.amount, orjson.dumps(entry).decode()


def watches_of(name: str, raw: bytes, now: float) -> list[Watch]:
    """Of a record of the directory under its field's name."""
    kind: type[Organization] | type[Project] | type[ApiKey]
    kind = Organization if name == ORGANIZATION else Project if name.startswith("project/") else ApiKey
    record = kind.model_validate_json(raw)
    subject = Subject(ORGANIZATION if kind is Organization else record.id, record.limits, record.budgets)
    checks = budget_checks(subject, now)
    return [Watch(check, share) for check in checks for share in dict.fromkeys((check.budget.soft, 1.0))]
