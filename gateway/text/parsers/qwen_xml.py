"""Qwen3-Coder's calls: a <function=…> with <parameter=…> values as plain text, typed by the function's schema.

Knows schemas only as far as the type of a property.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from noria.gateway.text.parsers.stream import Steps, TextStream

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END, _VALUE_END = "<function=", "</function>", "</parameter>"
_NAME = re.compile(r"(?P<name>[^>\s]+)>\s*(?=<)")
_PARAMETER = re.compile(r"<parameter=(?P<key>[^>]+)>(?:\n|(?=[^\n]))")


def qwen_xml(stream: TextStream, schemas: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
    """`schemas` are the functions' parameters by name."""
    called = False
    while True:
        found = yield from stream.until(OPEN, _FUNCTION, drop_blank=called)
        if found is None:
            return
        called = False
        before = found[0] + found[1]
        if found[1] == OPEN:
            before += yield from stream.blank()
            if not (yield from stream.literal(_FUNCTION)):
                stream.say(before)
                continue
            before += _FUNCTION
        header = yield from stream.header(_NAME, 512)
        if header is None:
            stream.say(before)
            continue
        called = True
        stream.begin_call(header["name"])
        yield from _parameters(stream, schemas.get(header["name"], {}))
        after = yield from stream.blank()
        if not (yield from stream.literal(CLOSE)):
            stream.give_back(after)


def _parameters(stream: TextStream, schema: Mapping[str, Any]) -> Steps[None]:
    types = schema.get("properties")
    given = 0
    while True:
        between = yield from stream.blank()
        if (yield from stream.literal(_FUNCTION_END)):
            break
        header = yield from stream.header(_PARAMETER, 512)
        if header is None:
            stream.give_back(between)
            break
        parts: list[str] = []
        end = yield from stream.until(_VALUE_END, out=parts.append)
        parts.append("" if end is None else end[0].removesuffix("\n"))
        kind = types.get(header["key"]) if isinstance(types, Mapping) else None
        value = _typed("".join(parts), kind.get("type") if isinstance(kind, Mapping) else None)
        stream.argue((", " if given else "{") + json.dumps(header["key"], ensure_ascii=False) + ": " + value)
        given += 1
    stream.argue("}" if given else "{}")


def _typed(text: str, kind: Any) -> str:
    """The value as JSON: a string where the schema says so or where it is nothing else."""
    if kind != "string":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)
