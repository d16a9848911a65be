"""Whatever the masks of an enforced schema allow is valid under the schema itself, by another library's judgement."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from bench.grammar_walk import Walker, allowed
from bench.schema_suite import SUPPORTED, generated
from noria.engine.grammar.grammars import Grammars
from noria.engine.wire.messages import Grammar
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.grammars.json_schema import enforceable
from noria.gateway.grammars.patterns import whole

SCHEMAS = SUPPORTED | {f"generated {seed}": generated(seed) for seed in range(12)}
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
WALKS = 4


def validator(schema: Any) -> Any:
    old = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    kind = jsonschema.Draft7Validator if old else jsonschema.Draft202012Validator
    return kind(schema, format_checker=CHECKER)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_walk_is_valid(smollm_grammars: Grammars, smollm_walker: Walker, name: str) -> None:
    schema = SCHEMAS[name]
    written = json.dumps(enforceable(schema), ensure_ascii=False)
    compiled = smollm_grammars.compile(Grammar("json_schema", written)).result(60)
    texts = list(smollm_walker.texts(compiled, WALKS))
    assert texts, "no walk came to an end"
    for text in texts:
        validator(schema).validate(json.loads(text))


OPTIONAL = [
    "(?:a[0-9]+)?b",
    "(?:a[0-9]{1,3})?b",
    "(?:a(?:bc){1,3})?d",
    "(?:a[0-9]{1,3}|z)?b",
    "(?:ab)?c",
    "(?:a[0-9]+?)??b",
]


@pytest.mark.parametrize("pattern", OPTIONAL)
def test_what_is_optional_is_so_as_a_whole(smollm_grammars: Grammars, smollm_walker: Walker, pattern: str) -> None:
    written = json.dumps(enforceable({"type": "string", "pattern": f"^{pattern}$"}))
    compiled = smollm_grammars.compile(Grammar("json_schema", written)).result(60)
    texts = [json.loads(text) for text in smollm_walker.texts(compiled, 30)]
    assert texts and [text for text in texts if not re.fullmatch(pattern, text)] == []


BEHIND_A_REPETITION = ["[_]{2}[Ĩb]x", "_+[ĨĪ]x", "(?:_[ab]?|a)[一-三Ĩ]*x", "_?[б]?x", r"\w{2}\s\d+"]


@pytest.mark.parametrize("pattern", BEHIND_A_REPETITION)
def test_a_mask_allows_nothing_that_the_matcher_refuses(
    smollm_grammars: Grammars, smollm_tokenizer: Tokenizer, pattern: str
) -> None:
    compiled = smollm_grammars.compile(Grammar("regex", whole(pattern))).result(60)
    matcher = compiled.matcher()
    for token_id in allowed(matcher.fill()[0], 49152):
        assert compiled.matcher().accept([int(token_id)]), smollm_tokenizer.token_bytes(int(token_id))


@pytest.mark.parametrize("key", ['"\\u0069d"', '"i\\u0064"', '"id"'])
def test_a_declared_property_is_not_written_twice(
    smollm_grammars: Grammars, smollm_tokenizer: Tokenizer, key: str
) -> None:
    schema = {
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
    }
    written = json.dumps(enforceable(schema))
    compiled = smollm_grammars.compile(Grammar("json_schema", written)).result(60)

    def follows(text: str) -> bool:
        return compiled.matcher().accept(smollm_tokenizer.encode(text))

    assert follows('{"id": 1, "idx": true, "i": false}') and not follows('{"id": 1, ' + key)
