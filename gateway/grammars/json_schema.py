"""JSON schemas brought into the one form of which an engine enforces every word, or refused with the place and reason.

The result allows nothing that the schema forbids; here and there it allows less (docs/structured-outputs.md says
where). Its nodes are `{}`, a reference, `anyOf`, `enum`, or one `type` with its keywords. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from noria.gateway.grammars import numbers, strings
from noria.gateway.grammars.combining import Schema, apart, as_types, merged, type_of
from noria.gateway.grammars.containers import array, object_
from noria.gateway.grammars.errors import Unsupported, inside

MAX_NODES = 5000
MAX_DEPTH = 64
MAX_ENUM = 2000
MAX_PATTERNS = 16 * 1024
MAX_ONE_OF = 64
"""At most, of a schema: schemas in it, levels of nesting, values of all enumerations together, characters of all
patterns together, schemas of one `oneOf`."""

ANNOTATIONS = frozenset((
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "contentEncoding", "contentMediaType",
))  # fmt: skip
"""Keywords that say nothing about what is valid here. So do all that begin with `x-`."""

_OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    ),
    "boolean": (),
    "null": (),
}  # fmt: skip
_OF_TYPE["integer"] = _OF_TYPE["number"]
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum", "type", "nullable")
KEYWORDS = frozenset((*_COMBINING, *(key for keys in _OF_TYPE.values() for key in keys)))
"""Every keyword that is enforced, at least where nothing stands in its way."""


def enforceable(schema: Any) -> Schema:
    """The schema in the form described above. Raises Unsupported."""
    return _Normaliser(schema).whole()


class _Normaliser:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # of the definitions, by the references that ask for them
        self._num_nodes = 0
        self._num_values = 0
        self._pattern_chars = 0

    def whole(self) -> Schema:
        body = self.node(self._root, "#", 0)
        definitions: Schema = {}
        while len(definitions) < len(self._names):
            for reference, name in list(self._names.items()):
                if name not in definitions:
                    self._check_circle(reference)
                    definitions[name] = self.node(self._found(reference, reference), reference, 0)
        return {"$defs": definitions, **body} if definitions else body

    def node(self, schema: Any, place: str, depth: int) -> Schema:
        """One schema, in its enforced form."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise Unsupported(f"the schema has more than {MAX_NODES} parts, references followed")
        if depth > MAX_DEPTH:
            raise Unsupported(f"the schema is nested more than {MAX_DEPTH} levels deep", place)
        if schema is True:
            return {}
        if schema is False:
            raise Unsupported("the schema 'false' allows nothing", place)
        if not isinstance(schema, dict):
            raise Unsupported("a schema must be an object or a boolean", place)
        node = {k: v for k, v in schema.items() if k not in ANNOTATIONS and not k.startswith("x-") and v is not None}
        for key in node:
            if key not in KEYWORDS:
                raise Unsupported(f"'{key[:64]}' is not supported", place)
        if "$ref" in node and len(node) == 1:
            return {"$ref": f"#/$defs/{self._name(node['$ref'], place)}"}
        if "$ref" in node or "allOf" in node:
            return self.node(self._conjunction(node, place, depth + 1), place, depth + 1)
        if "anyOf" in node or "oneOf" in node:
            return self._alternatives(node, place, depth)
        if "const" in schema or "enum" in node:
            return self._listed({**node, **({"const": schema["const"]} if "const" in schema else {})}, place)
        return self._typed(node, place, depth)

    def _conjunction(self, node: Schema, place: str, depth: int) -> Schema:
        """A schema with references and `allOf` worked into it."""
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise Unsupported("'allOf' or '$ref' lead to themselves, or too far", place)
        parts: list[Any] = [{k: v for k, v in node.items() if k not in ("$ref", "allOf")}]
        if "$ref" in node:
            parts.append(self._found(node["$ref"], place))
        parts += self._list(node, "allOf", place)
        whole: Schema = {}
        for part in parts:
            if part is True:
                continue
            if not isinstance(part, dict):
                raise Unsupported("a part of 'allOf' must be an object", place)
            bare = {k: v for k, v in part.items() if k not in ANNOTATIONS}
            if "$ref" in bare or "allOf" in bare:
                bare = self._conjunction(bare, place, depth + 1)
            whole = merged(whole, bare, place)
        return whole

    def _alternatives(self, node: Schema, place: str, depth: int) -> Schema:
        if "anyOf" in node and "oneOf" in node:
            raise Unsupported("'anyOf' beside 'oneOf' is not supported", place)
        key = "anyOf" if "anyOf" in node else "oneOf"
        beside = {k: v for k, v in node.items() if k != key}
        branches = [branch for branch in self._list(node, key, place) if branch is not False]
        if not branches:
            raise Unsupported(f"'{key}' has no schema that allows anything", place)
        if key == "oneOf" and len(branches) > MAX_ONE_OF:
            raise Unsupported(f"'oneOf' has more than {MAX_ONE_OF} schemas", place)
        if key == "oneOf" and not apart([self._followed(branch, place) for branch in branches]):
            message = "'oneOf' is supported where types, listed values or a required property tell its schemas apart"
            raise Unsupported(f"{message}: use 'anyOf'", place)
        if beside:
            branches = [{"allOf": [beside, branch]} for branch in branches]
        written = [self.node(b, inside(place, key, i), depth + 1) for i, b in enumerate(branches)]
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _listed(self, node: Schema, place: str) -> Schema:
        values = [node["const"]] if "const" in node else node["enum"]
        if not isinstance(values, list) or not values:
            raise Unsupported("'enum' must be a list of values", place)
        if "const" in node and "enum" in node:
            values = [value for value in values if value in node["enum"]]
        beside = [k for k in node if k not in ("const", "enum", "type", "nullable")]
        if beside:
            raise Unsupported(f"'{beside[0]}' beside 'enum' or 'const' is not supported", place)
        self._num_values += len(values)
        if self._num_values > MAX_ENUM:
            raise Unsupported(f"the schema lists more than {MAX_ENUM} values", place)
        if "type" in node:
            values = [value for value in values if any(_is_of(value, t) for t in as_types(node["type"]))]
        if not values:
            raise Unsupported("no listed value is allowed beside the rest", place)
        return {"enum": values}

    def _typed(self, node: Schema, place: str, depth: int) -> Schema:
        types = list(dict.fromkeys(self._types(node, place))) if "type" in node else _implied(node)
        if node.get("nullable") is True and types and "null" not in types:
            types.append("null")
        if "number" in types and "integer" in types:
            types.remove("integer")
        written = [self._of_type(name, node, place, depth) for name in types]
        return {} if not written else written[0] if len(written) == 1 else {"anyOf": written}

    def _types(self, node: Schema, place: str) -> list[str]:
        types = as_types(node["type"])
        for name in types:
            if not isinstance(name, str) or name not in _OF_TYPE:
                raise Unsupported(f"'type' {str(name)[:64]!r} is not known", place)
        return types

    def _of_type(self, name: str, node: Schema, place: str, depth: int) -> Schema:
        own = {key: node[key] for key in _OF_TYPE[name] if key in node}
        self._pattern_chars += sum(len(p) for p in _patterns(own) if isinstance(p, str))
        if self._pattern_chars > MAX_PATTERNS:
            raise Unsupported(f"the schema's patterns have more than {MAX_PATTERNS:,} characters in all", place)
        if name == "string":
            return strings.string(own, place)
        if name == "integer":
            return numbers.integer(own, place)
        if name == "number":
            return numbers.number(own, place)
        if name == "array":
            return array(own, place, lambda schema, *steps: self.node(schema, inside(place, *steps), depth + 1))
        if name == "object":
            return object_(own, place, lambda schema, *steps: self.node(schema, inside(place, *steps), depth + 1))
        return {"type": name}

    # --- references -----------------------------------------------------------------------------------------------

    def _name(self, reference: Any, place: str) -> str:
        self._found(reference, place)
        return self._names.setdefault(reference, f"d{len(self._names)}")

    def _found(self, reference: Any, place: str) -> Any:
        """What a reference points to."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise Unsupported("'$ref' must point into this schema, as '#/$defs/name' does", place)
        here = self._root
        for step in reference.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and step in here:
                here = here[step]
            elif isinstance(here, list) and step.isdigit() and int(step) < len(here):
                here = here[int(step)]
            else:
                raise Unsupported(f"'$ref' {reference[:128]!r} points to nothing", place)
        return here

    def _followed(self, schema: Any, place: str) -> Mapping[str, Any]:
        """A schema behind its references, for a look at it."""
        seen = 0
        while isinstance(schema, dict) and "$ref" in schema and seen < MAX_DEPTH:
            schema, seen = self._found(schema["$ref"], place), seen + 1
        return schema if isinstance(schema, dict) else {}

    def _check_circle(self, reference: str) -> None:
        if "$ref" in self._followed({"$ref": reference}, reference):
            raise Unsupported("references lead to themselves and to nothing else", reference)

    def _list(self, node: Schema, key: str, place: str) -> list[Any]:
        value = node.get(key, [])
        if not isinstance(value, list) or (key in node and not value):
            raise Unsupported(f"'{key}' must be a list of schemas", place)
        return value


def _implied(node: Schema) -> list[str]:
    """The types that an untyped schema speaks of: others would be valid, and nobody wants them."""
    return [name for name, keys in _OF_TYPE.items() if name != "integer" and any(key in node for key in keys)]


def _patterns(node: Schema) -> list[Any]:
    names, by_pattern = node.get("propertyNames"), node.get("patternProperties")
    found = [node.get("pattern"), names.get("pattern") if isinstance(names, dict) else None]
    return found + (list(by_pattern) if isinstance(by_pattern, dict) else [])


def _is_of(value: Any, name: Any) -> bool:
    if name == "integer":
        return type_of(value) == "number" and float(value).is_integer()
    return bool(type_of(value) == name)
