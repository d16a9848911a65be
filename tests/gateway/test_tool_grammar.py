"""Grammars of calls, walked by the engine's own library: what they let through is what the parser reads as calls."""

from __future__ import annotations

import json

import pytest

from noria.engine.grammar import binding
from noria.gateway.text.parsers.catalog import ParserPlan
from noria.gateway.text.pieces import joined
from noria.gateway.tool_grammar import GRAMMAR_FORMATS, MAX_CALLS, forced_grammar, free_grammar
from noria.gateway.tools import Function

EOS = 256
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [Function("weather", None, CITY, True), Function("now")]
SCHEMAS = {function.name: function.schema for function in FUNCTIONS}

CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</tool_call>",
    "llama": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "json": '{"name": "weather", "arguments": {"city": "Rome"}}',
}


@pytest.fixture(scope="module")
def compiler():
    return binding.new_compilers(binding.tables([*(bytes([byte]) for byte in range(256)), b""], [EOS]))


def fits(compiler, grammar, text) -> bool:
    """Whether the whole text fits and the answer may end behind it."""
    matcher = binding.new_matcher(binding.compiled(compiler, grammar))
    return all(matcher.accept_token(token, False) for token in [*text.encode(), EOS])


def test_every_format_has_a_call_here():
    assert set(CALLS) == set(GRAMMAR_FORMATS)


@pytest.mark.parametrize(("form", "call"), CALLS.items())
def test_a_forced_call_is_one_and_the_parser_reads_it(compiler, form, call):
    one = forced_grammar(form, FUNCTIONS, many=False, opened=None, param="tools")
    many = forced_grammar(form, FUNCTIONS, many=True, opened=None, param="tools")
    assert fits(compiler, one, call) and fits(compiler, many, f"{call}\n{call}")
    assert not fits(compiler, one, f"{call}\n{call}")
    calls = "\n".join([call] * MAX_CALLS)
    assert fits(compiler, many, calls) and not fits(compiler, many, f"{calls}\n{call}")
    for wrong in (
        "Hello",
        call.replace("weather", "whether"),
        call.replace("Rome", "").replace("city", "town"),
        call[:-1],
    ):
        assert not fits(compiler, many, wrong)
    parser = ParserPlan(tools=form, schemas=SCHEMAS)("seed")
    parts = joined([*parser.feed(f"{call}\n{call}"), *parser.finish()])
    assert parts.text == "" and [json.loads(c.arguments) for c in parts.calls] == [{"city": "Rome"}] * 2


def test_thoughts_may_come_before_a_forced_call(compiler):
    thinking = forced_grammar("json", FUNCTIONS, many=False, opened=False, param="tools")
    inside = forced_grammar("json", FUNCTIONS, many=False, opened=True, param="tools")
    call = CALLS["json"]
    assert fits(compiler, thinking, f"<think>\nHm.\n</think>\n\n{call}") and fits(compiler, thinking, call)
    assert fits(compiler, inside, f"Hm.\n</think>\n\n{call}") and not fits(compiler, inside, call)


@pytest.mark.parametrize("form", ["hermes", "qwen_xml"])
def test_free_text_may_hold_calls_and_nothing_that_only_begins_as_one(compiler, form):
    grammar = free_grammar(form, FUNCTIONS, many=True, param="tools")
    call = CALLS[form]
    for good in ("Hello <b>.", call, f"Let me see.\n{call}\n{call} Done."):
        assert fits(compiler, grammar, good)
    for wrong in ("<tool_call> no", call.replace("weather", "whether"), call.replace("city", "town")):
        assert not fits(compiler, grammar, wrong)
    single = free_grammar(form, FUNCTIONS, many=False, param="tools")
    assert fits(compiler, single, call) and not fits(compiler, single, f"{call}\n{call}")


def test_nothing_is_held_where_no_function_is_strict():
    assert free_grammar("hermes", [Function("now")], many=True, param="tools") is None
    assert free_grammar("llama", FUNCTIONS, many=True, param="tools") is None
