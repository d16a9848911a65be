"""Calls written as a Python list: `[get_weather(city="Rome"), f()]`, as Llama 3.2 and 4 do. Nothing of it is run.

Only a list at the beginning of an answer, of functions that there are, is one of calls.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from noria.gateway.text.parsers.stream import Steps, TextStream

PYTHON_TAG = "<|python_tag|>"
_NAME = re.compile(r"\s*(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)(?=\()")
_MARK = re.compile(r"""["'()\[\]{}\\]""")
_MAX_CALL = 256 * 1024  # characters
_CONSTANTS = {"true": True, "false": False, "null": None}


def pythonic(stream: TextStream) -> Steps[None]:
    space = yield from stream.blank()
    tag = PYTHON_TAG if (yield from stream.literal(PYTHON_TAG)) else ""
    called = False
    if (yield from stream.literal("[")):
        called = yield from _call(stream)
        if not called:
            stream.give_back("[")
    if not called:
        stream.give_back(space + tag)
    while called:
        before = yield from stream.blank()
        if (yield from stream.literal("]")):
            break
        if not (yield from stream.literal(",")):
            stream.give_back(before)
            break
        if not (yield from _call(stream)):
            stream.give_back(before + ",")
            break
    yield from stream.until(drop_blank=called)


def _call(stream: TextStream) -> Steps[bool]:
    """Take one call. Nothing is taken where it is none."""
    header = yield from stream.header(_NAME, 512)
    if header is None:
        return False
    length = (yield from _closing(stream)) if header["name"] in stream.allowed else None
    given = None if length is None else _keywords(stream.text[:length])
    if length is None or given is None:
        stream.give_back(header[0])
        return False
    stream.text = stream.text[length:]
    stream.begin_call(header["name"])
    stream.argue(given)
    return True


def _closing(stream: TextStream) -> Steps[int | None]:
    """Wait for the parenthesis that closes the call: the length up to behind it."""
    place, depth, quote = 0, 0, ""
    while True:
        while (found := _MARK.search(stream.text, place)) is not None:
            mark, place = found[0], found.end()
            if mark == "\\":
                if place == len(stream.text) and not stream.ended:
                    place -= 1
                    break
                place += 1
            elif quote:
                quote = "" if mark == quote else quote
            elif mark in "\"'":
                quote = mark
            else:
                depth += 1 if mark in "([{" else -1
                if depth == 0:
                    return place
        else:
            place = len(stream.text)
        if stream.ended or len(stream.text) > _MAX_CALL:
            return None
        yield


def _keywords(text: str) -> str | None:
    """The keyword arguments of `(…)` as JSON; None where there are others, or values that are no literals."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        given = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """A literal; JSON's own words for the constants count as such."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is no string")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)
