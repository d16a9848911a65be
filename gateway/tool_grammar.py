"""Grammars of calls, as xgrammar's structural tags: what a call must look like in the model's own format.

Knows how formats are spelled and no library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noria.engine.wire.messages import Grammar
from noria.gateway.errors import InvalidRequest
from noria.gateway.grammars.errors import Unsupported
from noria.gateway.grammars.json_schema import enforceable
from noria.gateway.grammars.structural_tags import as_form, json_form
from noria.gateway.text.parsers.thinking import CLOSE, OPEN
from noria.gateway.tools import Function

Form = dict[str, Any]

MAX_CALLS = 16
"""Forced calls in one answer at most: a small model that must call does not know when it has called enough."""


@dataclass(frozen=True, slots=True)
class _Spelling:
    """A call is `begin(name)`, its arguments, `end`. `trigger` is what every call begins with, if nothing else does;
    `style` is how the arguments are written."""

    begin: Callable[[str], str]
    end: str
    trigger: str | None = None
    style: str = "json"


GRAMMAR_FORMATS: Mapping[str, _Spelling] = {
    "hermes": _Spelling(
        lambda name: f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>", "<tool_call>"
    ),
    "qwen_xml": _Spelling(
        lambda name: f"<tool_call>\n<function={name}>\n", "\n</function>\n</tool_call>", "<tool_call>", "qwen_xml"
    ),
    "llama": _Spelling(lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', "}"),
    "json": _Spelling(lambda name: f'{{"name": {json.dumps(name)}, "arguments": ', "}"),
}
"""Formats that a grammar can hold a model to. Control tokens are no text to a grammar: formats that need them are not
here, and forced calls are then written as "json"."""

_ANY_OBJECT = {"type": "object"}


def forced_grammar(form: str, functions: Sequence[Function], *, many: bool, opened: bool | None, param: str) -> Grammar:
    """Calls of these functions and nothing else, one or (`many`) up to `MAX_CALLS`, behind thoughts if it has any
    (`opened`: the model stands inside them already; None: it has none)."""
    spelling = GRAMMAR_FORMATS[form]
    call = _either(
        [_sequence(_text(spelling.begin(f.name)), _arguments(f, spelling), _text(spelling.end)) for f in functions]
    )
    parts = [] if opened is None else [_thoughts(opened=opened)]
    parts.append(call)
    if many:
        parts.append({"type": "repeat", "min": 0, "max": MAX_CALLS - 1, "content": _sequence(_text("\n"), call)})
    return _grammar(_sequence(*parts), param)


def free_grammar(form: str, functions: Sequence[Function], *, many: bool, param: str) -> Grammar | None:
    """Any text, in which calls that begin go on as calls, and those of strict functions with arguments that fit.

    None where that would hold nothing: no function is strict, or calls have no beginning of their own.
    """
    spelling = GRAMMAR_FORMATS[form]
    if spelling.trigger is None or not any(function.strict for function in functions):
        return None
    tags = [
        {
            "type": "tag",
            "begin": spelling.begin(f.name),
            "content": _arguments(f, spelling, loose=not f.strict),
            "end": spelling.end,
        }
        for f in functions
    ]
    form_of_all = {"type": "triggered_tags", "triggers": [spelling.trigger], "tags": tags, "stop_after_first": not many}
    return _grammar(form_of_all, param)


def content_grammar(content: Grammar, *, opened: bool | None) -> Grammar:
    """The client's own grammar, behind thoughts if the model has any (`opened` as above)."""
    return content if opened is None else _grammar(_sequence(_thoughts(opened=opened), as_form(content)), content.param)


def either_grammar(content: Grammar, calls: Grammar, *, opened: bool | None) -> Grammar:
    """The client's own grammar, or calls and nothing else; `calls` without thoughts."""
    choice = _either([as_form(content), as_form(calls)])
    return _grammar(choice if opened is None else _sequence(_thoughts(opened=opened), choice), content.param)


def _arguments(function: Function, spelling: _Spelling, *, loose: bool = False) -> Form:
    schema = _ANY_OBJECT if loose else function.schema
    if spelling.style == "json":
        schema = _enforceable(schema, function)
    return json_form(schema, spelling.style)


def _enforceable(schema: Any, function: Function) -> Any:
    """The schema as an engine enforces it. Of a function that is not strict, any object where it cannot be."""
    try:
        return enforceable(schema)
    except Unsupported as error:
        if function.strict:
            message = f"Invalid schema for function '{function.name}': {error}."
            raise InvalidRequest(message, param="tools", code="invalid_function_parameters") from None
        return {"type": "object", "additionalProperties": True}


def _thoughts(*, opened: bool) -> Form:
    thoughts = {"type": "tag", "begin": "" if opened else OPEN, "content": {"type": "any_text"}, "end": CLOSE + "\n\n"}
    return thoughts if opened else {"type": "optional", "content": thoughts}


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _either(forms: list[Form]) -> Form:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}


def _grammar(form: Form, param: str) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}), param)
