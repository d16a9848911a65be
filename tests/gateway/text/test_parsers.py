"""Every format: what models of its family really write, cut anywhere, and what only looks like a call."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.engine.wire.messages import REASONING_PARSERS, TOOL_PARSERS
from noria.gateway.text.parsers.catalog import (
    THINKING_MARKERS,
    TOOL_FORMATS,
    ParserPlan,
    reasoning_format_of,
    tool_format_of,
)
from noria.gateway.text.pieces import Parts, ToolCallPiece, joined
from tests.gateway.text.parser_samples import BROKEN, ROME, SCHEMAS, THOUGHT, WHOLE, hermes


def parse(plan: ParserPlan, pieces) -> Parts:
    parser = plan("seed")
    found = [piece for text in pieces for piece in parser.feed(text)]
    found += parser.finish()
    for index, begun in enumerate(p for p in found if isinstance(p, ToolCallPiece) and p.id is not None):
        assert begun.index == index and begun.name, "dense indices, id and name together"
    return joined(found)


def cuts_of(text):
    return st.lists(st.integers(0, len(text)), max_size=9).map(
        lambda cuts: [text[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True)]
    )


@pytest.mark.parametrize(("form", "text", "said", "calls"), WHOLE, ids=lambda v: v[:24] if isinstance(v, str) else "")
def test_calls_are_found(form, text, said, calls):
    parts = parse(ParserPlan(tools=form, schemas=SCHEMAS), [text])
    assert parts.text == said
    assert [(c.name, json.loads(c.arguments)) for c in parts.calls] == calls
    assert len({c.id for c in parts.calls}) == len(calls) and all(c.id.startswith("call_") for c in parts.calls)
    assert parse(ParserPlan(tools=form, schemas=SCHEMAS), list(text)) == parts


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_what_is_no_call_stays_text_to_the_last_character(form, text):
    for pieces in ([text], list(text)):
        parts = parse(ParserPlan(tools=form, schemas=SCHEMAS), pieces)
        assert (parts.text, parts.calls) == (text, [])


@pytest.mark.parametrize(("text", "opened", "thought", "said"), THOUGHT)
def test_thoughts(text, opened, thought, said):
    for pieces in ([text], list(text)):
        parts = parse(ParserPlan(reasoning="think", opened=opened), pieces)
        assert (parts.reasoning, parts.text) == (thought, said)


def test_thoughts_and_calls_of_harmony():
    text = (
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary to=functions.now"
        " <|constrain|>json<|message|>{}<|call|>"
    )
    parts = parse(ParserPlan(reasoning="harmony"), list(text))
    assert (parts.reasoning, parts.text, parts.calls[0].name) == ("The user asks.", "", "now")


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "now", "arguments": ', "{}", "}", "]", "[", ",",
    ";", "\n", " ", "now(", ")", "a=1", "'", '"', "\\", "<", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "analysis",
    "final", " to=functions.now", "<|message|>", "<|end|>", "<|start|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "now", "<｜tool▁sep｜>", "<function=now>", "<parameter=a>", "</parameter>", "</function>",
    "```json\n", "<|python_tag|>",
]  # fmt: skip
SAMPLES = [*(text for _, text, _, _ in WHOLE), *(text for _, text in BROKEN), *(text for text, *_ in THOUGHT)]
TEXTS = st.one_of(st.sampled_from(SAMPLES), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))


@settings(max_examples=300)
@given(st.data(), st.sampled_from([None, *TOOL_FORMATS]), st.sampled_from(list(THINKING_MARKERS)), st.booleans(), TEXTS)
def test_any_split_gives_the_same_as_the_whole(data, form, reasoning, opened, text):
    plan = ParserPlan(reasoning=reasoning, opened=opened, tools=form, schemas=SCHEMAS)
    want = parse(plan, [text])
    assert parse(plan, data.draw(cuts_of(text))) == want
    assert parse(plan, list(text)) == want


def test_arguments_stream_while_they_come():
    parser = ParserPlan(tools="hermes", schemas=SCHEMAS)("seed")
    assert parser.feed('<tool_call>\n{"name": "weather", "argum') == []
    assert parser.feed('ents": ') == []
    begun, more = parser.feed('{"ci')
    assert begun.name == "weather" and begun.id
    assert more.arguments == '{"ci'
    assert parser.feed('ty": "R')[0].id is None


def test_ids_follow_from_the_seed_alone():
    text = hermes(("now", {}), ("now", {}))
    plan = ParserPlan(tools="hermes", schemas=SCHEMAS)
    assert parse(plan, [text]) == parse(plan, list(text))
    other = plan("another seed")
    assert other.feed(text)[0].id not in {c.id for c in parse(plan, [text]).calls}


def test_no_more_calls_than_asked_for():
    plan = ParserPlan(tools="hermes", schemas=SCHEMAS, max_calls=1)
    assert [c.name for c in parse(plan, [hermes(("now", {}), ("weather", ROME))]).calls] == ["now"]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", None, "none"),
        (None, None, "none"),
        ("… <tool_call> …", "hermes", "none"),
        ("… <tool_call> … </think> …", "hermes", "think"),
        ("… <tool_call> … <function= …", "qwen_xml", "none"),
        ("… [TOOL_CALLS] …", "mistral", "none"),
        ("… <｜tool▁call▁begin｜> … </think>", "deepseek", "think"),
        ("… <|channel|>analysis …", "harmony", "harmony"),
        ("… <|python_tag|> …", "llama", "none"),
        ("… [func_name1(params_name1=params_value1)] … <|python_tag|>", "pythonic", "none"),
    ],
)
def test_formats_are_told_from_templates(template, tools, reasoning):
    assert (tool_format_of(template), reasoning_format_of(template)) == (tools, reasoning)


def test_the_names_that_an_engine_takes_are_those_of_the_formats():
    assert {"auto", "none", *TOOL_FORMATS} == set(TOOL_PARSERS)
    assert {"auto", *THINKING_MARKERS} == set(REASONING_PARSERS)


def test_parsing_is_cheap_and_linear():
    """100,000 tokens of text, and of arguments, in well under a second each."""
    for text in (
        "word " * 100_000,
        '<tool_call>{"name": "now", "arguments": {"a": "' + "word " * 100_000,
        "[" * 50_000,
    ):
        parser = ParserPlan(tools="hermes", schemas=SCHEMAS)("seed")
        begun = time.process_time()
        for place in range(0, len(text), 5):
            parser.feed(text[place : place + 5])
        assert time.process_time() - begun < 2.5
