"""Several JSON schemas that must all hold, as one; and whether two of them can hold at once. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from noria.gateway.grammars.errors import Unsupported

Schema = dict[str, Any]

_STRONGER: dict[str, Callable[[Any, Any], Any]] = {
    "minimum": max, "exclusiveMinimum": max, "minLength": max, "minItems": max, "minProperties": max,
    "maximum": min, "exclusiveMaximum": min, "maxLength": min, "maxItems": min, "maxProperties": min,
}  # fmt: skip
_OPEN_ENDED = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")


def merged(first: Mapping[str, Any], second: Mapping[str, Any], place: str) -> Schema:
    """One schema for what both allow. Raises Unsupported where that cannot be written down."""
    for a, b in ((first, second), (second, first)):
        closed = [key for key in _OPEN_ENDED if a.get(key, True) is not True]
        if closed and b.get("properties", {}).keys() - a.get("properties", {}).keys():
            raise Unsupported(f"'{closed[0]}' beside properties that another part declares is not supported", place)
    both = {**first, **second}
    for key in first.keys() & second.keys():
        both[key] = _both(key, first[key], second[key], place)
    return both


def _both(key: str, a: Any, b: Any, place: str) -> Any:
    if a == b:
        return a
    if key == "type":
        return _common_types(a, b, place)
    if key == "required":
        return list(dict.fromkeys([*a, *b]))
    if key == "enum":
        return [value for value in a if any(value == other and type_of(value) == type_of(other) for other in b)]
    if key == "properties" and isinstance(a, dict) and isinstance(b, dict):
        return {name: _all_of([p[name] for p in (a, b) if name in p]) for name in dict.fromkeys([*a, *b])}
    if key in _STRONGER and isinstance(a, int | float) and isinstance(b, int | float):
        return _STRONGER[key](a, b)
    raise Unsupported(f"two different '{key}' that must both hold are not supported", place)


def _all_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"allOf": schemas}


def _common_types(a: Any, b: Any, place: str) -> list[str]:
    left, right = as_types(a), as_types(b)
    common = [t for t in left if t in right or (t == "integer" and "number" in right)]
    common += [t for t in right if t == "integer" and "number" in left and t not in common]
    if not common:
        raise Unsupported("no type is allowed by all parts", place)
    return common


def as_types(value: Any) -> list[Any]:
    """The list behind a `type`, which may be a single name."""
    return value if isinstance(value, list) else [value]


def apart(schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no value can match two of them, by their types, their listed values, or a property that tells them
    apart. References must have been followed; False where it cannot be seen."""
    return all(_apart(a, b) for a, b in combinations(schemas, 2))


def _apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not any(value in values_b for value in values_a)
    types_a, types_b = _types(a), _types(b)
    if types_a is None or types_b is None:
        return False
    common = types_a & types_b
    if common != {"object"}:
        return not common
    required = set(a.get("required", ())) & set(b.get("required", ()))
    tags = ((a.get("properties", {}).get(name), b.get("properties", {}).get(name)) for name in required)
    return any(isinstance(p, dict) and isinstance(q, dict) and _apart(p, q) for p, q in tags)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """Types that a value may have, integers among the numbers; None: any."""
    values = _values(schema)
    if values is not None:
        return {type_of(value) for value in values}
    if "type" not in schema:
        return None
    return {"number" if t == "integer" else str(t) for t in as_types(schema["type"])}


def type_of(value: Any) -> str:
    """JSON Schema's name for a value's type, integers counted as numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: list[tuple[type | tuple[type, ...], str]] = [((int, float), "number"), (str, "string"), (list, "array")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")
