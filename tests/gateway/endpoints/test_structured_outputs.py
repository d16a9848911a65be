"""Structured outputs as clients ask for them: what reaches the engine, what is refused and how it is named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from noria.engine.wire.messages import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 8}
NAMED = {"name": "answer", "schema": SCHEMA}
CALL = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def ask(client, endpoint: str = "chat/completions", **fields: Any):
    base = CHAT if endpoint == "chat/completions" else TEXT
    return client.post(f"/v1/{endpoint}", json={**base, **fields})


def seen(engine) -> Grammar | None:
    return engine.seen[-1].request.sampling.grammar


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "json_schema", SCHEMA, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": False, "description": "d"}}},
            "json_schema", SCHEMA, "response_format",
        ),
        ({"response_format": {"type": "json_object"}}, "json_object", None, "response_format"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_choice": ["a", "b", "a"]}, "choice", ["a", "b"], "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["é"]}}, "choice", ["é"], "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": True}}, "json_object", None, "structured_outputs.json_object"),
    ],
)  # fmt: skip
def test_a_form_reaches_the_engine(client, engine, endpoint, fields, kind, text, param):
    assert ask(client, endpoint, **fields).status_code == 200
    grammar = seen(engine)
    assert grammar is not None and (grammar.kind, grammar.param) == (kind, param)
    assert (json.loads(grammar.text) if grammar.text else None) == text


def test_patterns_and_grammars_reach_the_engine(client, engine):
    for fields in ({"guided_regex": "(?<x>a|b)+?c"}, {"structured_outputs": {"regex": "(a|b)+c"}}):
        assert ask(client, **fields).status_code == 200
        grammar = seen(engine)
        assert grammar is not None and grammar.kind == "regex" and re.fullmatch(grammar.text, "abac")
        assert not re.fullmatch(grammar.text, "c")
    ebnf = 'root ::= "x"'
    for fields in ({"guided_grammar": ebnf}, {"structured_outputs": {"grammar": ebnf}}):
        assert ask(client, **fields).status_code == 200
        grammar = seen(engine)
        assert grammar is not None and (grammar.kind, grammar.text) == ("ebnf", ebnf)


def test_structural_tags_of_both_kinds_are_one(client, engine):
    old = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
    new = {"format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [CALL]}}
    found = []
    for tag in (old, new):
        assert ask(client, response_format={"type": "structural_tag", **tag}).status_code == 200
        found.append(seen(engine))
    assert ask(client, structured_outputs={"structural_tag": json.dumps(new)}).status_code == 200
    assert found[0] == found[1] and found[0] is not None and seen(engine).text == found[0].text
    assert '"max_whitespace_cnt": 8' in found[0].text


def test_text_is_held_to_nothing(client, engine):
    assert ask(client, response_format={"type": "text"}).status_code == 200
    assert seen(engine) is None


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


IN_FORMAT = "response_format.json_schema"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, IN_FORMAT),
    (schema_format(schema={}), f"{IN_FORMAT}.name"), (schema_format(name="a b", schema={}), f"{IN_FORMAT}.name"),
    (schema_format(name="x" * 65), f"{IN_FORMAT}.name"), (schema_format(name="x", schema=[]), f"{IN_FORMAT}.schema"),
    (schema_format(name="x", strict="yes"), f"{IN_FORMAT}.strict"),
    (schema_format(name="x", schema={"not": {}}), "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": {"type": "int"}}, "guided_json"),
    ({"guided_json": {"enum": ["x" * 200_000]}}, "guided_json"),
    ({"guided_regex": "(a"}, "guided_regex"), ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"), ({"guided_choice": ["a"] * 1001}, "guided_choice"),
    ({"guided_grammar": "x" * 200_000}, "guided_grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_had_is_named(client, engine, fields, param):
    for endpoint in ("chat/completions", "completions"):
        response = ask(client, endpoint, stream=True, **fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param, response.text
    assert not engine.seen


def test_the_place_in_the_schema_is_told(client):
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    error = ask(client, **schema_format(name="n", schema=schema)).json()["error"]
    assert error["code"] == "invalid_json_schema"
    fault = "at #/properties/x: 'uniqueItems' is not supported"
    assert error["message"] == f"Invalid schema for response_format 'n': {fault}."


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_refuses_the_grammar_makes_a_400_of_it(client, engine, stream):
    engine.fail_with, engine.fail_param = "rule 'root' is not found", "guided_grammar"
    response = ask(client, guided_grammar="x", stream=stream, n=3)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_grammar")
    assert error["message"] == "Invalid 'guided_grammar': rule 'root' is not found."


def test_a_stream_with_a_grammar_begins_with_the_first_word(client, engine):
    text = ask(client, guided_regex="a+", stream=True, max_tokens=50).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and text.endswith("data: [DONE]\n\n")
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == engine.answer


def test_beside_tools_the_text_or_a_call_is_held(client, engine):
    form = {"type": "json_schema", "json_schema": NAMED}
    assert ask(client, response_format=form, tools=[TOOL], tool_choice="none").status_code == 200
    assert seen(engine).kind == "json_schema"
    assert ask(client, response_format=form, tools=[TOOL]).status_code == 200
    assert seen(engine).kind == "structural_tag"
    assert ask(client, response_format=form, tools=[TOOL], tool_choice="required").status_code == 200
    assert seen(engine).param == "tools"


def test_a_strict_function_needs_a_schema_that_can_be_enforced(client, engine):
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}, "if": {}}}
    response = ask(client, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
