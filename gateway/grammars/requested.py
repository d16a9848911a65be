"""From the fields of a request to the one grammar that its output must match.

Knows the fields' names, so that each error names its own; knows no endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import orjson

from noria.engine.wire.messages import Grammar
from noria.gateway.errors import InvalidRequest
from noria.gateway.grammars.errors import Unsupported
from noria.gateway.grammars.json_schema import enforceable
from noria.gateway.grammars.patterns import whole
from noria.gateway.grammars.structural_tags import enforceable_tag
from noria.gateway.schemas.structured import (
    JSONObjectFormat,
    JSONSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
)

MAX_BYTES = 128 * 1024
"""Of a schema, a grammar or a list of choices, as JSON."""

MAX_CHOICES = 1000


class Asking(Protocol):
    """A request with the fields of structured outputs."""

    @property
    def response_format(self) -> ResponseFormat | None: ...
    @property
    def guided_json(self) -> dict[str, Any] | str | None: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...
    @property
    def structured_outputs(self) -> StructuredOutputs | None: ...


def requested_grammar(request: Asking) -> Grammar | None:
    """What the output must match; None where nothing is asked for. Raises `InvalidRequest` for a grammar that cannot
    be had, and for two of them."""
    found = list(_asked(request))
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        message = f"'{first}' and '{second}' exclude each other: an output can be held to one form only."
        raise InvalidRequest(message, param=second, code="invalid_parameter_combination")
    if not found:
        return None
    param, make = found[0]
    try:
        return make(param)
    except Unsupported as error:
        raise InvalidRequest(f"Invalid '{param}': {error}.", param=param, code="invalid_value") from None


def schema_grammar(schema: Any, param: str) -> Grammar:
    """JSON that is valid under `schema`. Raises Unsupported."""
    _check_size(schema)
    return Grammar("json_schema", json.dumps(enforceable(schema), ensure_ascii=False), param)


_Make = Callable[[str], Grammar]


def _asked(request: Asking) -> Iterator[tuple[str, _Make]]:
    """Field and maker of everything that is asked for."""
    form = request.response_format
    if isinstance(form, JSONObjectFormat):
        yield "response_format", lambda param: Grammar("json_object", "", param)
    elif isinstance(form, JSONSchemaFormat):
        named = form.json_schema
        yield "response_format", lambda param: _named(named.schema_, named.name, param)
    elif isinstance(form, StructuralTagFormat):
        tag = form.model_dump(exclude_none=True)
        yield "response_format", lambda param: _structural_tag(tag, param)
    yield from _of("guided_json", request.guided_json, _json)
    yield from _of("guided_regex", request.guided_regex, _regex)
    yield from _of("guided_choice", request.guided_choice, _choice)
    yield from _of("guided_grammar", request.guided_grammar, _ebnf)
    more = request.structured_outputs
    if more is not None:
        yield from _of("structured_outputs.json", more.json_, _json)
        yield from _of("structured_outputs.regex", more.regex, _regex)
        yield from _of("structured_outputs.choice", more.choice, _choice)
        yield from _of("structured_outputs.grammar", more.grammar, _ebnf)
        yield from _of("structured_outputs.json_object", more.json_object, lambda _, p: Grammar("json_object", "", p))
        yield from _of("structured_outputs.structural_tag", more.structural_tag, _structural_tag)


def _of(param: str, value: Any, make: Callable[[Any, str], Grammar]) -> Iterator[tuple[str, _Make]]:
    if value is not None:
        yield param, lambda name: make(value, name)


def _named(schema: Any, name: str, param: str) -> Grammar:
    try:
        return schema_grammar(schema, param)
    except Unsupported as error:
        message = f"Invalid schema for response_format '{name}': {error}."
        raise InvalidRequest(message, param=param, code="invalid_json_schema") from None


def _json(schema: Any, param: str) -> Grammar:
    return schema_grammar(_decoded(schema), param)


def _regex(pattern: str, param: str) -> Grammar:
    return Grammar("regex", whole(pattern), param)


def _choice(options: list[str], param: str) -> Grammar:
    if not options or len(options) > MAX_CHOICES or not all(options):
        raise Unsupported(f"expected 1 to {MAX_CHOICES} strings that are not empty")
    _check_size(options)
    return Grammar("choice", json.dumps(list(dict.fromkeys(options))), param)


def _ebnf(text: str, param: str) -> Grammar:
    _check_size(text)
    return Grammar("ebnf", text, param)


def _structural_tag(tag: Any, param: str) -> Grammar:
    tag = _decoded(tag)
    _check_size(tag)
    return Grammar("structural_tag", json.dumps(enforceable_tag(tag)), param)


def _decoded(value: Any) -> Any:
    """The value, or what its text says in JSON."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_BYTES:
        raise Unsupported(f"more than {MAX_BYTES:,} bytes")
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise Unsupported(f"no JSON: {error}") from None


def _check_size(value: Any) -> None:
    try:
        num_bytes = len(orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested more than 254 levels deep, or a lone surrogate
        raise Unsupported("nested too deep, or no Unicode") from None
    if num_bytes > MAX_BYTES:
        raise Unsupported(f"{num_bytes:,} bytes of JSON are more than the {MAX_BYTES:,} allowed")
