"""Schemas in their enforced form: every keyword that is listed works, every other one is named, nothing takes long.

That the form allows only what the schema allows is shown with the engine's masks, in tests/engine/grammar.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.schema_suite import SUPPORTED, UNSUPPORTED, generated
from noria.gateway.grammars.errors import Unsupported
from noria.gateway.grammars.json_schema import ANNOTATIONS, KEYWORDS, enforceable
from noria.gateway.grammars.strings import FORMATS

NODE_KEYS = KEYWORDS | {"$defs"}


def keys_of(schema: Any) -> set[str]:
    """Every keyword in an enforced schema."""
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for key in ("$defs", "properties", "patternProperties"):
        for inner in schema.get(key, {}).values():
            found |= keys_of(inner)
    for key in ("anyOf", "prefixItems"):
        for inner in schema.get(key, []):
            found |= keys_of(inner)
    for key in ("items", "additionalProperties"):
        found |= keys_of(schema.get(key))
    return found


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_is_supported_comes_out_in_few_words(name: str) -> None:
    written = enforceable(SUPPORTED[name])
    assert keys_of(written) <= NODE_KEYS - {"allOf", "oneOf", "const", "nullable", "propertyNames", "uniqueItems"}
    enforceable(written)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_named(name: str) -> None:
    schema, word = UNSUPPORTED[name]
    for whole in (schema, {"type": "object", "properties": {"deep": {"type": "array", "items": schema}}}):
        if whole is not schema and (schema is False or "$ref" in str(schema)):
            continue  # an array without items is fine, and references point from the root
        with pytest.raises(Unsupported) as caught:
            enforceable(whole)
        assert word in str(caught.value)


def test_the_place_of_a_fault_is_told() -> None:
    with pytest.raises(Unsupported, match=r"at #/properties/a~1b/items/anyOf/1: 'not' is not supported"):
        enforceable({"properties": {"a/b": {"items": {"anyOf": [{}, {"not": {}}]}}}})


def test_generated_schemas_are_supported() -> None:
    for seed in range(300):
        enforceable(generated(seed))


def test_every_keyword_is_used_by_the_suite_and_told_in_the_docs() -> None:
    used = json.dumps([SUPPORTED, [schema for schema, _ in UNSUPPORTED.values()]], default=str)
    assert [key for key in KEYWORDS - {"nullable"} if f'"{key}"' not in used] == []
    text = (Path(__file__).parents[3] / "docs" / "structured-outputs.md").read_text()
    told = set(text.replace("|", " ").replace("(", " ").replace(")", " ").split("`"))
    assert [key for key in (*KEYWORDS, *FORMATS) if key not in told] == []
    refused = {"not", "if", "uniqueItems", "contains", "dependentRequired", "dependentSchemas", "$dynamicRef"}
    assert [key for key in refused if key not in told] == []
    assert "$comment" in ANNOTATIONS and "$comment" in told


def ladder(width: int, levels: int) -> Any:
    """References that double at every level: far more parts than it has words."""
    steps = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * width} for i in range(levels)}
    return {"$defs": {**steps, str(levels): {"type": "integer"}}, "$ref": "#/$defs/0"}


@pytest.mark.parametrize(
    "schema",
    [
        ladder(3, 40),
        {"anyOf": [{"anyOf": [{"type": "integer"}] * 70}] * 70},
        {"allOf": [{"anyOf": [{"type": "integer"}] * 900}, {"minimum": 1}]},
        {"oneOf": [{"const": i} for i in range(3000)]},
        {"enum": list(range(5000))},
        {"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000},
        {"type": "string", "pattern": "(a|" * 300 + "b" + ")*" * 300},
        {"type": "string", "pattern": "^(a+)+$" * 500},
        {"type": "array", "prefixItems": [{}] * 6000},
        {"properties": {str(i): {"pattern": "[a-z]{1,9}" * 40} for i in range(250)}},
        {"properties": {str(i): {"pattern": "(a|b)*c"} for i in range(2000)}},
        {"properties": {f"p{i}": {"type": "object", "properties": {"q": {"minLength": 1}}} for i in range(2400)}},
    ],
)
def test_no_schema_takes_long(schema: Any) -> None:
    started = time.process_time()
    with suppress(Unsupported):
        enforceable(schema)
    assert time.process_time() - started < 1
