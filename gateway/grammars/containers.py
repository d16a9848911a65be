"""JSON Schema's arrays and objects, as an engine enforces them: it writes properties in the order of the schema, and
none that the schema does not allow by name or by rule. Knows the schemas inside by `part` alone, which writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from noria.gateway.grammars.errors import Unsupported, inside
from noria.gateway.grammars.keys import other_than
from noria.gateway.grammars.patterns import in_string

Schema = dict[str, Any]
Part = Callable[..., Schema]
"""Called with a schema and the steps that lead to it from here."""

MAX_COUNT = 100_000
"""Largest `minItems`, `maxItems`, `minProperties` and `maxProperties`."""


def array(node: Mapping[str, Any], place: str, part: Part) -> Schema:
    """The enforced form of an array's keywords."""
    prefix, items = node.get("prefixItems", []), node.get("items")
    if isinstance(items, list):  # as it was written before 2020-12
        prefix, items = items, node.get("additionalItems")
    if not isinstance(prefix, list):
        raise Unsupported("'prefixItems' must be a list of schemas", place)
    low, high = _counts(node, "minItems", "maxItems", place)
    if node.get("uniqueItems") is True and (high is None or high > 1):
        raise Unsupported("'uniqueItems' is not supported", place)
    if high is not None and high <= len(prefix):
        prefix, items = prefix[:high], False
    if items is None and (not prefix or low > len(prefix)):
        items = True
    written: Schema = {"type": "array"}
    if prefix:
        written["prefixItems"] = [part(schema, "prefixItems", i) for i, schema in enumerate(prefix)]
    if items is None or items is False:
        if low > len(prefix):
            raise Unsupported("'minItems' is more than the items that are allowed", place)
        written["items"], high = False, len(prefix)
    else:
        written["items"] = part(items, "items")
    return written | ({"minItems": low} if low else {}) | ({} if high is None else {"maxItems": high})


def object_(node: Mapping[str, Any], place: str, part: Part) -> Schema:
    """The enforced form of an object's keywords."""
    properties, required, patterns = _parts_of_object(node, place)
    more = node.get("additionalProperties", node.get("unevaluatedProperties"))
    if more is None and not properties and not patterns:
        more = True
    low, high = _counts(node, "minProperties", "maxProperties", place)
    for name in required:
        if name not in properties:
            if more is False:
                raise Unsupported(f"the required property {name[:64]!r} is not allowed", place)
            properties[name] = True if more is None else more
    forbidden = [name for name, schema in properties.items() if schema is False]
    if set(forbidden) & set(required):
        raise Unsupported(f"the required property {forbidden[0][:64]!r} is not allowed", place)
    if forbidden and more not in (None, False):
        raise Unsupported("a property that is 'false' beside additional properties is not supported", place)
    written: Schema = {"type": "object"}
    known = {name: part(schema, "properties", name) for name, schema in properties.items() if schema is not False}
    if known:
        written["properties"] = known
    if required:
        written["required"] = list(dict.fromkeys(required))
    open_ended = _open_ended(node, patterns, known, more, place, part)
    if high is not None and len(set(required)) > high:
        raise Unsupported("more properties are required than 'maxProperties' allows", place)
    is_open = open_ended != {"additionalProperties": False}
    if low > (len(set(required)) + 1 if is_open else len(known)):
        raise Unsupported("so large a 'minProperties' is not supported: a name could be written twice", place)
    counts = ({"minProperties": low} if low else {}) | ({} if high is None else {"maxProperties": high})
    return written | open_ended | counts


def _open_ended(
    node: Mapping[str, Any], patterns: Mapping[str, Any], known: Schema, more: Any, place: str, part: Part
) -> Schema:
    """What is allowed beside the declared properties."""
    names = node.get("propertyNames")
    if known and len(patterns) == 1 and patterns.keys() == {other_than(known)}:  # enforced already
        (schema,) = patterns.values()
        return _others(known, part(schema, "patternProperties"))
    if patterns:
        if len(patterns) > 1 or known or more not in (None, False) or names is not None:
            message = "'patternProperties' is supported with one pattern, and without other properties"
            raise Unsupported(message, place)
        ((pattern, schema),) = patterns.items()
        written = part(schema, "patternProperties", pattern)
        return {"patternProperties": {_key_pattern(pattern, place): written}, "additionalProperties": False}
    if more is None or more is False:
        return {"additionalProperties": False}
    if known and names in (None, True):
        return _others(known, part(more, "additionalProperties"))
    if names is None or names is True:
        return {"additionalProperties": part(more, "additionalProperties")}
    if known or not isinstance(names, dict) or set(names) - {"type", "pattern", "title", "description"}:
        raise Unsupported("'propertyNames' is supported with a 'pattern' alone, and without 'properties'", place)
    spelled = _key_pattern(names.get("pattern", ""), inside(place, "propertyNames"))
    return {"patternProperties": {spelled: part(more, "additionalProperties")}, "additionalProperties": False}


def _others(known: Schema, written: Schema) -> Schema:
    return {"patternProperties": {other_than(known): written}, "additionalProperties": False}


def _parts_of_object(node: Mapping[str, Any], place: str) -> tuple[Schema, list[str], Schema]:
    properties, required = node.get("properties", {}), node.get("required", [])
    patterns = node.get("patternProperties", {})
    if not isinstance(properties, dict):
        raise Unsupported("'properties' must be an object of schemas", place)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise Unsupported("'required' must be a list of names", place)
    if not isinstance(patterns, dict):
        raise Unsupported("'patternProperties' must be an object of schemas", place)
    return dict(properties), required, patterns


def _key_pattern(pattern: Any, place: str) -> str:
    if not isinstance(pattern, str):
        raise Unsupported("a pattern must be a string", place)
    try:
        return in_string(pattern)
    except Unsupported as error:
        raise Unsupported(str(error), place) from None


def _counts(node: Mapping[str, Any], least: str, most: str, place: str) -> tuple[int, int | None]:
    for key in (least, most):
        value = node.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_COUNT):
            raise Unsupported(f"'{key}' must be a whole number from 0 to {MAX_COUNT:,}", place)
    low, high = node.get(least, 0), node.get(most)
    if high is not None and low > high:
        raise Unsupported(f"'{least}' is more than '{most}'", place)
    return low, high
