"""What an administrator may write of limits, budgets and prices: narrower than what is read back, so that a record
stays readable when a bound becomes tighter.

Knows the records; no store and no HTTP.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from noria.gateway.tenancy.records import Budget, Limits

MAX_USD = 9_000_000
"""Of a budget: in billionths of a dollar it is below 2**53, up to which the store's scripts count exactly. A token
costs a dollar at most (`Price`), so that a request of nine million tokens is still counted exactly."""

MAX_MODEL_NAME = 200
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]")


def _model_name(name: str) -> str:
    """U+FFFD stands where a client's bytes were no UTF-8."""
    if not 0 < len(name) <= MAX_MODEL_NAME:
        raise PydanticCustomError("model_name", "a model's name has 1 to {most} characters", {"most": MAX_MODEL_NAME})
    if _UNPRINTABLE.search(name):
        raise PydanticCustomError("model_name", "a model's name has no control characters and is UTF-8")
    return name


def _countable(budget: Budget) -> Budget:
    if budget.unit == "usd" and budget.limit > MAX_USD:
        context = {"most": MAX_USD, "param_suffix": "limit"}
        raise PydanticCustomError("budget_limit", "a budget has {most} US dollars at most", context)
    return budget


def _names_models(limits: Limits) -> Limits:
    for model in limits.models:
        try:
            _model_name(model)
        except PydanticCustomError as error:
            context = {**(error.context or {}), "param_suffix": "models"}
            raise PydanticCustomError("model_name", error.message_template, context) from None
    return limits


ModelName: TypeAlias = Annotated[str, AfterValidator(_model_name)]
GivenLimits: TypeAlias = Annotated[Limits, AfterValidator(_names_models)]
GivenBudgets: TypeAlias = Annotated[
    tuple[Annotated[Budget, AfterValidator(_countable)], ...], Field(strict=False, max_length=8)
]
