"""What a chat template gets to see: messages brought to one shape, users' strings guarded.

This file knows no Jinja, vocabulary or network.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NONCHARACTERS = [*map(chr, range(0xFDD0, 0xFDF0)), *(chr((plane << 16) + 0xFFFE) for plane in range(1, 17))]
_ANY_NONCHARACTER = re.compile(f"[{''.join(_NONCHARACTERS)}]")
_MAX_DEPTH = 64
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TYPES = frozenset({"text", "function", "object", "string", "number", "integer", "boolean", "array", "null"})
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class TemplateError(ValueError):
    """The messages cannot be rendered; the message is fit for the client."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a chat template can take. `content_parts`: text is shown only as a list of parts (vision models). `tools`:
    tools are shown; `calls`: the history's calls are, with `text_arguments` only if their arguments are JSON text.
    `short_ids`: the ids of calls must be nine letters or digits (Mistral)."""

    developer_role: bool = False
    system_role: bool = True
    content_parts: bool = False
    tools: bool = False
    calls: bool = False
    text_arguments: bool = False
    short_ids: bool = False


def normalised(messages: Sequence[Mapping[str, Any]], traits: Traits) -> list[dict[str, Any]]:
    """The messages as a template with these traits expects them.

    `content`: None or absent becomes "", a list of text parts their plain concatenation (no separator: the client's
    text is neither changed nor added to), wrapped as one text part where the template wants parts. Other fields that
    are None are dropped, since templates ask `is defined`. Arguments of calls become mappings, unless text is wanted;
    results get the name of the function that was called. Raises TemplateError for parts that are no text.
    """
    names: dict[Any, Any] = {}
    shaped = []
    for message in messages:
        one = _normalised(message, traits)
        for call in one.get("tool_calls") or ():
            if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                names[call.get("id")] = call["function"].get("name")
        name = names.get(one.get("tool_call_id")) if one.get("role") == "tool" else None
        shaped.append(one if name is None else {"name": name, **one})
    return shaped


def _normalised(message: Mapping[str, Any], traits: Traits) -> dict[str, Any]:
    shaped = {key: value for key, value in message.items() if value is not None}
    text = _text(message.get("content"))
    shaped["content"] = [{"type": "text", "text": text}] if traits.content_parts else text
    if shaped.get("role") == "developer" and not traits.developer_role:
        shaped["role"] = "system"
    calls = shaped.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        shaped["tool_calls"] = [_normalised_call(call, traits) for call in calls]
    if traits.short_ids and isinstance(shaped.get("tool_call_id"), str):
        shaped["tool_call_id"] = _short(shaped["tool_call_id"])
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


def _normalised_call(call: Any, traits: Traits) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    shaped = dict(call)
    if traits.short_ids and isinstance(call.get("id"), str):
        shaped["id"] = _short(call["id"])
    arguments = function.get("arguments")
    if not traits.text_arguments:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return {**shaped, "function": {**function, "arguments": arguments}}


def _parsed(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments  # the model once wrote broken JSON; it is shown as it was
        return parsed if isinstance(parsed, dict) else arguments
    return {} if arguments is None else arguments


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


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
