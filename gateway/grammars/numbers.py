"""JSON Schema's numbers and integers: bounds and multiples, as an engine enforces them. Knows no other type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from noria.gateway.grammars.errors import Unsupported

LARGEST_INTEGER = 2**62
LARGEST_NUMBER = 10**15
_STEP = Fraction(1, 10**6)
"""Bounds of numbers are taken to six places, inwards."""

MAX_LISTED = 1000
"""Multiples that are listed one by one, where they cannot be told otherwise."""

_NATIVE_MULTIPLES = 1024
"""The largest step that engines know by themselves, and then without bounds."""


def integer(node: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The enforced form of an integer's keywords."""
    low, high = _bounds(node, Fraction(1), LARGEST_INTEGER, place)
    step = _multiple(node, place)
    if step is None:
        return {"type": "integer"} | _written(low, high, int)
    return _multiples_of(step.numerator, low, high, place)


def number(node: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The enforced form of a number's keywords. A fraction as step is followed exactly within bounds that leave few
    multiples, and by the whole numbers among its multiples elsewhere."""
    low, high = _bounds(node, _STEP, LARGEST_NUMBER, place)
    step = _multiple(node, place)
    if step is None:
        return {"type": "number"} | _written(low, high, float)
    if step.denominator > 1 and low is not None and high is not None and (high - low) / step <= MAX_LISTED:
        first, last = math.ceil(low / step), math.floor(high / step)
        return _listed([float(i * step) for i in range(first, last + 1)], place)
    whole_low = None if low is None else Fraction(math.ceil(low))
    whole_high = None if high is None else Fraction(math.floor(high))
    return _multiples_of(step.numerator, whole_low, whole_high, place)


def _multiples_of(step: int, low: Fraction | None, high: Fraction | None, place: str) -> dict[str, Any]:
    """Whole multiples of `step`: all, or where bounds are given or the step is large, those nearest to the bounds, or
    to zero."""
    if low is None and high is None and step <= _NATIVE_MULTIPLES:
        return {"type": "integer", "multipleOf": step}
    first = None if low is None else math.ceil(low / step)
    last = None if high is None else math.floor(high / step)
    if first is None:
        first = -MAX_LISTED // 2 if last is None else last - MAX_LISTED + 1
    if last is None:
        last = first + MAX_LISTED - 1
    elif last - first >= MAX_LISTED:
        first = max(first, min(last, MAX_LISTED // 2) - MAX_LISTED + 1)
        last = min(last, first + MAX_LISTED - 1)
    return _listed([i * step for i in range(first, last + 1)], place)


def _listed(values: list[Any], place: str) -> dict[str, Any]:
    if not values:
        raise Unsupported("no number fits", place)
    return {"enum": values}


def _multiple(node: Mapping[str, Any], place: str) -> Fraction | None:
    value = _number(node, "multipleOf", place)
    if value is not None and not 0 < value <= LARGEST_NUMBER:
        raise Unsupported("'multipleOf' must be above 0", place)
    return value


def _bounds(
    node: Mapping[str, Any], step: Fraction, largest: int, place: str
) -> tuple[Fraction | None, Fraction | None]:
    """Inclusive bounds in whole steps; exclusive ones are moved by one. Bounds beyond `largest` are drawn in."""
    lows, highs = [], []
    if (value := _number(node, "minimum", place)) is not None:
        lows.append(math.ceil(value / step))
    if (value := _number(node, "exclusiveMinimum", place)) is not None:
        lows.append(math.floor(value / step) + 1)
    if (value := _number(node, "maximum", place)) is not None:
        highs.append(math.floor(value / step))
    if (value := _number(node, "exclusiveMaximum", place)) is not None:
        highs.append(math.ceil(value / step) - 1)
    low = max(Fraction(-largest), max(lows) * step) if lows else None
    high = min(Fraction(largest), min(highs) * step) if highs else None
    if (low is not None and low > largest) or (high is not None and high < -largest):
        raise Unsupported(f"bounds beyond {largest} are not supported", place)
    if low is not None and high is not None and low > high:
        raise Unsupported("no number is within the bounds", place)
    return low, high


def _number(node: Mapping[str, Any], key: str, place: str) -> Fraction | None:
    value = node.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported(f"'{key}' must be a number", place)
    return Fraction(str(value))  # as it is written: 0.1 is a tenth


def _written(low: Fraction | None, high: Fraction | None, kind: type[int] | type[float]) -> dict[str, Any]:
    given = {"minimum": low, "maximum": high}
    return {
        key: int(value) if value.denominator == 1 else kind(value) for key, value in given.items() if value is not None
    }
