"""Structural tags: text of which parts must have a form, as xgrammar reads them; their schemas and patterns checked.

Knows which parts can hold which; the engine judges the rest.
"""

from __future__ import annotations

import json
from typing import Any

from noria.engine.wire.messages import Grammar
from noria.gateway.grammars.errors import Unsupported, inside
from noria.gateway.grammars.json_schema import enforceable
from noria.gateway.grammars.patterns import whole

MAX_DEPTH = 32
MAX_WHITESPACE = 8
"""White space between two tokens of JSON at most, as in the engine's own JSON."""


def enforceable_tag(tag: Any) -> dict[str, Any]:
    """The tag with everything in it in the form that an engine enforces. Raises Unsupported."""
    if not isinstance(tag, dict):
        raise Unsupported("a structural tag must be an object")
    form = tag.get("format")
    if form is None:
        form = _of_old(tag)
    return {"type": "structural_tag", "format": _form(form, "#/format", 0)}


def json_form(schema: Any, style: str = "json") -> dict[str, Any]:
    """JSON of an enforceable schema, as a part of a tag."""
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": MAX_WHITESPACE}


def as_form(grammar: Grammar) -> dict[str, Any]:
    """Any grammar as a part of a tag."""
    kind, text = grammar.kind, grammar.text
    if kind == "json_schema":
        return json_form(json.loads(text))
    if kind == "json_object":
        return json_form({"type": "object", "additionalProperties": True})
    if kind == "regex":
        return {"type": "regex", "pattern": text}
    if kind == "ebnf":
        return {"type": "grammar", "grammar": text}
    if kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": value} for value in json.loads(text)]}
    form: dict[str, Any] = json.loads(text)["format"]
    return form


def _of_old(tag: dict[str, Any]) -> dict[str, Any]:
    """Tags between triggers, as they were written before formats: begin, schema and end of each."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise Unsupported("a structural tag needs a 'format', or 'structures' and 'triggers'")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict) or not structure.keys() >= {"begin", "end"}:
            raise Unsupported("each of 'structures' needs a 'begin', a 'schema' and an 'end'")
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _form(form: Any, place: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Unsupported(f"nested more than {MAX_DEPTH} levels deep", place)
    if isinstance(form, list):
        return [_form(item, inside(place, i), depth + 1) for i, item in enumerate(form)]
    if not isinstance(form, dict):
        return form
    if form.get("type") == "json_schema":
        try:
            schema = enforceable(form.get("json_schema", {}))
        except Unsupported as error:
            raise Unsupported(f"its schema {error}", place) from None
        return {"max_whitespace_cnt": MAX_WHITESPACE, **form, "json_schema": schema}
    if form.get("type") == "regex" and isinstance(form.get("pattern"), str):
        return {**form, "pattern": whole(form["pattern"])}
    return {key: _form(value, inside(place, key), depth + 1) for key, value in form.items()}
