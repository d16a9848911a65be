"""What a chat template gets to see: messages brought to one shape, users' strings guarded.

This file knows no Jinja, vocabulary or network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_NONCHARACTERS = [*map(chr, range(0xFDD0, 0xFDF0)), *(chr((plane << 16) + 0xFFFE) for plane in range(1, 17))]
_ANY_NONCHARACTER = re.compile(f"[{''.join(_NONCHARACTERS)}]")
_MAX_DEPTH = 64
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TYPES = frozenset({"text", "function", "object", "string", "number", "integer", "boolean", "array", "null"})
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class TemplateError(ValueError):
    """The messages cannot be rendered; the message is fit for the client."""


def normalised(message: Mapping[str, Any], *, developer_role: bool, content_parts: bool) -> dict[str, Any]:
    """One message as templates expect it.

    `content`: None or absent becomes "", a list of text parts their plain concatenation (no separator: the client's
    text is neither changed nor added to); with `content_parts` the result is wrapped as one text part. Other fields
    that are None are dropped, since templates ask `is defined`. Arguments of tool calls become mappings. The role
    `developer` becomes `system` unless `developer_role`. Raises TemplateError for parts that are no text.
    """
    shaped = {key: value for key, value in message.items() if value is not None}
    text = _text(message.get("content"))
    shaped["content"] = [{"type": "text", "text": text}] if content_parts else text
    if shaped.get("role") == "developer" and not developer_role:
        shaped["role"] = "system"
    calls = shaped.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        shaped["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return shaped


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TemplateError("message content must be a string or a list of text parts")
    return "".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if field else None
    if not isinstance(text, str):
        raise TemplateError(f"content part of type {kind!r} is not supported: this model reads text only")
    return text


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call  # the model once wrote broken JSON; it is shown as it was
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def free_characters(count: int, *values: Any) -> list[str]:
    """`count` noncharacters that no string inside `values` contains. Raises TemplateError if there are too few."""
    used: set[str] = set()
    for text in _strings(values, 0):
        if not text.isascii():
            used.update(_ANY_NONCHARACTER.findall(text))
    free = [character for character in _NONCHARACTERS if character not in used]
    if len(free) < count:
        raise TemplateError("the messages use up all of Unicode's noncharacters")
    return free[:count]


def _strings(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        if depth > _MAX_DEPTH:
            raise TemplateError(f"messages or tools are nested more than {_MAX_DEPTH} levels deep")
        for item in value:
            yield from _strings(item, depth + 1)
            if isinstance(value, Mapping):
                yield from _strings(value[item], depth + 1)


def guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """A copy of `value` with `guard` applied to all its strings, keys included.

    The names of roles and of JSON types stay, since templates compare with them. Nesting is bounded by
    `free_characters`, which comes first.
    """
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {guarded(key, guard): _guarded_field(key, item, guard) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [guarded(item, guard) for item in value]
    return value


def _guarded_field(key: Any, value: Any, guard: Callable[[str], str]) -> Any:
    names = _ROLES if key == "role" else _TYPES if key == "type" else frozenset[str]()
    return value if isinstance(value, str) and value in names else guarded(value, guard)
