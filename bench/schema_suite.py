"""JSON schemas as clients write them: written by hand for each keyword, and generated; and those that nobody enforces.

Knows no server and no engine.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def closed(required: list[str] | None = None, /, **properties: Any) -> Schema:
    """An object of these properties and no others; all are required unless told."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


_TEXT: Schema = {"type": "string", "maxLength": 24}
_ADDRESS = closed(street=_TEXT, number={"type": "integer", "minimum": 1, "maximum": 9999}, city=_TEXT)
_TREE: Schema = {
    "$defs": {
        "node": closed(
            value={"type": "integer", "minimum": 0, "maximum": 99},
            children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        )
    },
    "$ref": "#/$defs/node",
}
_LINKED = {
    "type": "object",
    "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
_STEPS: Schema = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": closed(explanation=_TEXT, output=_TEXT),
            "maxItems": 3,
        },
        "final_answer": _TEXT,
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Reasoning",
}
_SHAPES = [
    closed(kind={"const": "circle"}, radius={"type": "number", "minimum": 0, "maximum": 100}),
    closed(kind={"const": "square"}, side={"type": "number", "exclusiveMinimum": 0, "maximum": 100}),
]

SUPPORTED: dict[str, Schema | bool] = {
    # types
    "string": {"type": "string", "maxLength": 40},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "types in a list": {"type": ["string", "integer", "null"], "maxLength": 12},
    "no type, one implied": {"minLength": 2, "maxLength": 9},
    "no type, an object implied": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "anything": {},
    "true": True,
    # strings
    "minLength": {"type": "string", "minLength": 3, "maxLength": 3},
    "maxLength": {"type": "string", "maxLength": 5},
    "no characters": {"type": "string", "maxLength": 0},
    "long": {"type": "string", "minLength": 120, "maxLength": 260},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
    "pattern not anchored": {"type": "string", "pattern": "[a-z]{2}"},
    "pattern anchored at one end": {"type": "string", "pattern": "^ab?"},
    "pattern of alternatives": {"type": "string", "pattern": "^(?:yes|no|maybe so)$"},
    "pattern anchored in each alternative": {"type": "string", "pattern": "^a[0-9]$|^b[0-9]$"},
    "pattern with classes": {"type": "string", "pattern": r"^\w{2}\s\d+$"},
    "pattern with negated class": {"type": "string", "pattern": "^[^a-z\\d]{4}$"},
    "pattern and length": {"type": "string", "pattern": "^[a-z]*$", "minLength": 4, "maxLength": 8},
    "pattern beyond ASCII": {"type": "string", "pattern": "^[à-ÿ]+ é$"},
    "pattern beyond Latin 1": {"type": "string", "pattern": "^[_]{1,2}[aĨ一-三]?[ぁ-ん]+[б]x$"},
    "pattern with a dot": {"type": "string", "pattern": "^a.{2}z$"},
    "lazy pattern": {"type": "string", "pattern": "^a+?b$"},
    **{f"format {name}": {"type": "string", "format": name} for name in (
        "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
    )},
    # numbers
    "minimum": {"type": "integer", "minimum": 7},
    "maximum": {"type": "integer", "maximum": -7},
    "bounds": {"type": "integer", "minimum": -12, "maximum": 345},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "fractions as bounds of an integer": {"type": "integer", "minimum": 1.5, "maximum": 4.2},
    "number minimum": {"type": "number", "minimum": 2.5},
    "number maximum": {"type": "number", "maximum": 0.125},
    "number bounds": {"type": "number", "minimum": -1.25, "maximum": 37.5},
    "number exclusive bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "bounds of many places": {"type": "number", "minimum": 0.12345649, "maximum": 0.12346},
    "multipleOf": {"type": "integer", "multipleOf": 5},
    "multipleOf within bounds": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 100},
    "multipleOf with one bound": {"type": "integer", "multipleOf": 25, "minimum": 0},
    "large multipleOf": {"type": "integer", "multipleOf": 100000},
    "multipleOf a half": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 5},
    "multipleOf a quarter without bounds": {"type": "number", "multipleOf": 0.25},
    "multipleOf of a number": {"type": "number", "multipleOf": 3},
    # values
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of all types": {"enum": ["a\"b\\c\n", 1, -2.5, True, None, {"x": [1, "y"]}, []]},
    "enum beyond ASCII": {"type": "string", "enum": ["naïve", "日本語", "🎉🎉", "Ωmega"]},
    "enum narrowed by type": {"type": "integer", "enum": [1, "two", 3, 4.0]},
    "const": {"const": "fixed"},
    "const object": {"const": {"a": [1, None, {"b": "c"}]}},
    "const null": {"const": None},
    # arrays
    "array": {"type": "array", "items": {"type": "integer"}, "maxItems": 6},
    "minItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "array of anything": {"type": "array", "minItems": 1, "maxItems": 2},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "integer"}, _TEXT], "items": False, "minItems": 2},
    "prefixItems and items": {"type": "array", "prefixItems": [{"type": "integer"}], "items": _TEXT, "maxItems": 4},
    "items as a list": {"type": "array", "items": [{"type": "integer"}, {"type": "null"}], "additionalItems": False},
    "fewer items than prefixItems": {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 1},
    "nested arrays": {"type": "array", "items": {"type": "array", "items": {"const": 0}, "maxItems": 3}, "maxItems": 3},
    "unique where there is one": {"type": "array", "items": _TEXT, "uniqueItems": True, "maxItems": 1},
    # objects
    "object": closed(name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "optional properties": closed(["b"], a={"type": "integer"}, b={"type": "boolean"}, c={"type": "null"}),
    "nothing required": closed([], a={"type": "integer"}, b={"type": "boolean"}),
    "open object": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "free object": {"type": "object", "maxProperties": 2},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "map beside properties": {
        "type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"],
        "additionalProperties": {"type": "boolean"}, "maxProperties": 3,
    },
    "required but not declared": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["z", "a"]},
    "minProperties": {"type": "object", "additionalProperties": {"const": 1}, "minProperties": 1, "maxProperties": 2},
    "minProperties of declared": {**closed([], a={"const": 1}, b={"const": 2}, c={"const": 3}), "minProperties": 2},
    "patternProperties": {
        "type": "object", "patternProperties": {"^x_[a-z]{1,4}$": {"type": "integer"}}, "additionalProperties": False,
        "maxProperties": 2,
    },
    "propertyNames": {
        "type": "object", "propertyNames": {"pattern": "^[a-z]{1,6}$"}, "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "a property that is true": closed(any=True, b={"const": 1}),
    "a property that is false": closed(["a"], a={"const": 1}, b=False),
    "names with every kind of character": closed(
        **{"a\"b": {"const": 1}, "c\\d": {"const": 2}, "é ü": {"const": 3}, "": {"const": 4}}
    ),
    "unevaluatedProperties": {"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False},
    "nested objects": closed(
        person=closed(name=_TEXT, address=_ADDRESS), tags={"type": "array", "items": _TEXT, "maxItems": 2}
    ),
    "deep": closed(a=closed(b=closed(c=closed(d=closed(e=closed(f={"type": "boolean"})))))),
    "annotations": {
        **closed(a={"type": "integer", "title": "A", "description": "x", "default": 3, "examples": [1], "x-order": 1}),
        "$id": "https://example.com/s", "$comment": "c",
    },
    # combining
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}]},
    "anyOf objects": {"anyOf": [closed(a={"type": "integer"}), closed(b={"type": "boolean"})]},
    "anyOf in a property": closed(v={"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 1}]}),
    "anyOf beside a type": {"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 5, "maxLength": 6}]},
    "anyOf beside properties": {
        "type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "oneOf types": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
    "oneOf told apart": closed(shape={"oneOf": _SHAPES, "discriminator": {"propertyName": "kind"}}),
    "allOf of one": {"allOf": [{"type": "integer", "minimum": 3}]},
    "allOf": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 9}]},
    "allOf objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]},
        ]
    },
    "allOf with a reference": {
        "$defs": {"base": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"name": _TEXT}, "required": ["name"]}],
    },
    # references
    "$ref": {"$defs": {"w": {"maxLength": 8}}, "type": "array", "items": {"$ref": "#/$defs/w"}, "maxItems": 3},
    "definitions": {
        **closed(a={"$ref": "#/definitions/x"}, b={"$ref": "#/definitions/x"}), "definitions": {"x": {"const": 1}},
    },
    "$ref with a description": {
        "$defs": {"x": {"type": "boolean"}}, **closed(a={"$ref": "#/$defs/x", "description": "d", "default": True}),
    },
    "$ref beside keywords": {"$defs": {"x": {"type": "integer"}}, **closed(a={"$ref": "#/$defs/x", "minimum": 5})},
    "$ref into properties": closed(a={"type": "boolean"}, b={"$ref": "#/properties/a"}),
    "$ref with escapes": {"$defs": {"x/y": {"const": 1}, "a~b": {"const": 2}, "p q": {"const": 3}}, **closed(
        a={"$ref": "#/$defs/x~1y"}, b={"$ref": "#/$defs/a~0b"}, c={"$ref": "#/$defs/p%20q"})},
    "$ref to $ref": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": [1, 2]}}, "$ref": "#/$defs/a"},
    "tree": _TREE,
    "linked list": _LINKED,
    "mutual recursion": {
        "$defs": {
            "a": {"anyOf": [{"type": "null"}, closed(b={"$ref": "#/$defs/b"})]},
            "b": {"anyOf": [{"type": "boolean"}, closed(a={"$ref": "#/$defs/a"})]},
        },
        "$ref": "#/$defs/a",
    },
    "nested anything": closed(payload={}, list={"type": "array", "items": {}, "maxItems": 2}),
    "reasoning steps": _STEPS,
}  # fmt: skip

UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "false": (False, "false"),
    "not": ({"not": {"type": "string"}}, "'not'"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "'if'"),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "'uniqueItems'"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "'contains'"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {}}}, "'dependentSchemas'"),
    "$dynamicRef": ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
    "an unknown keyword": ({"type": "integer", "minmum": 3}, "'minmum'"),
    "an unknown type": ({"type": "int"}, "'int'"),
    "an unknown format": ({"type": "string", "format": "iri"}, "'iri'"),
    "format and length": ({"type": "string", "format": "date", "maxLength": 3}, "'format'"),
    "pattern and length": ({"type": "string", "pattern": "^(ab|c)+$", "maxLength": 3}, "'maxLength'"),
    "lookahead": ({"type": "string", "pattern": "^(?!a).*$"}, "lookahead"),
    "backreference": ({"type": "string", "pattern": r"^(a|b)\1$"}, "backreferences"),
    "word boundary": ({"type": "string", "pattern": r"\bfoo\b"}, "word boundaries"),
    "Unicode property": ({"type": "string", "pattern": r"^\p{L}+$"}, "regular expression"),
    "a flag": ({"type": "string", "pattern": "(?i)abc"}, "flags"),
    "a broken pattern": ({"type": "string", "pattern": "a("}, "regular expression"),
    "a pattern that JSON escapes": ({"type": "string", "pattern": '^"$'}, "JSON has to escape"),
    "a huge pattern": ({"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"}, "stands for more than"),
    "oneOf that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
    "oneOf objects that overlap": ({"oneOf": [closed(a={"type": "integer"}), closed(a={"type": "number"})]}, "'oneOf'"),
    "allOf of two types": ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "no type"),
    "allOf of closed objects": ({"allOf": [closed(a={"const": 1}), closed(b={"const": 1})]}, "'additionalProperties'"),
    "$ref elsewhere": ({"$ref": "https://example.com/schema"}, "'$ref'"),
    "$ref to an anchor": ({"$defs": {"a": {"$anchor": "a"}}, "$ref": "#a"}, "'$ref'"),
    "$ref to nothing": ({"$ref": "#/$defs/a"}, "points to nothing"),
    "$ref to itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "themselves"),
    "allOf that leads to itself": (
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "themselves",
    ),
    "no number": ({"type": "integer", "minimum": 5, "maximum": 3}, "no number"),
    "no multiple": ({"type": "integer", "multipleOf": 100, "minimum": 5, "maximum": 30}, "no number"),
    "no length": ({"type": "string", "minLength": 5, "maxLength": 3}, "'minLength'"),
    "an empty enum": ({"enum": []}, "'enum'"),
    "an enum of another type": ({"type": "string", "enum": [1, 2]}, "no listed value"),
    "enum beside a keyword": ({"enum": ["a", "b"], "minLength": 1}, "'minLength'"),
    "required and not allowed": ({**closed(["z"], a={"const": 1})}, "'z'"),
    "two patternProperties": ({"type": "object", "patternProperties": {"^a": {}, "^b": {}}}, "'patternProperties'"),
    "many minProperties": ({"type": "object", "minProperties": 3}, "'minProperties'"),
    "too deep": ({"type": "array", "items": {}}, "deep"),
    "no object": ([1], "object or a boolean"),
    "properties as a list": ({"type": "object", "properties": []}, "'properties'"),
    "a word as minimum": ({"type": "integer", "minimum": "3"}, "'minimum'"),
}  # fmt: skip

_nested: Any = {"type": "integer"}
for _ in range(80):
    _nested = {"type": "array", "items": _nested}
UNSUPPORTED["too deep"] = (_nested, "deep")


def generated(seed: int) -> Schema:
    """A random schema of a few levels, of what clients really use. The same for the same seed."""
    chance = random.Random(seed)
    definitions = {name: _node(chance, 2, []) for name in ("alpha", "beta")}
    schema = _object(chance, 3, list(definitions))
    return {**schema, "$defs": definitions} if chance.random() < 0.5 else {"$defs": definitions, **schema}


_WORDS = ("name", "count", "größe", "is_ok", "when", "items", "kind", "note", "id", "score", "名前", "x y")


def _object(chance: random.Random, depth: int, names: list[str]) -> Schema:
    properties = {word: _node(chance, depth - 1, names) for word in chance.sample(_WORDS, chance.randint(1, 4))}
    required = [word for word in properties if chance.random() < 0.7]
    return closed(required, **properties)


def _node(chance: random.Random, depth: int, names: list[str]) -> Schema:
    makers = [_string, _integer, _number, _values, lambda _: {"type": "boolean"}]
    if names:
        makers.append(lambda c: {"$ref": f"#/$defs/{c.choice(names)}"})
    if depth > 0:
        makers += [
            lambda c: _object(c, depth, names),
            lambda c: {"type": "array", "items": _node(c, depth - 1, names), "maxItems": c.randint(0, 3)},
            lambda c: {"anyOf": [_node(c, depth - 1, names), {"type": "null"}]},
        ]
    return chance.choice(makers)(chance)


def _string(chance: random.Random) -> Schema:
    low = chance.randint(0, 4)
    return chance.choice([
        {"type": "string", "minLength": low, "maxLength": low + chance.randint(0, 9)},
        {"type": "string", "pattern": chance.choice(["^[a-f0-9]{4}$", "^v[0-9]+\\.[0-9]$", "[xyz]$", "^(ja|nein)$"])},
        {"type": "string", "format": chance.choice(["date", "time", "uuid", "email", "ipv4", "date-time"])},
    ])  # fmt: skip


def _integer(chance: random.Random) -> Schema:
    low = chance.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 500)}


def _number(chance: random.Random) -> Schema:
    low = chance.randint(-500, 500) / 100
    return {"type": "number", "minimum": low, "maximum": round(low + chance.randint(1, 500) / 50, 2)}


def _values(chance: random.Random) -> Schema:
    values = chance.sample(["a", "b", "ç", 1, 2.5, None, True, "long value", "\n"], chance.randint(1, 4))
    return {"enum": values} if len(values) > 1 else {"const": values[0]}
