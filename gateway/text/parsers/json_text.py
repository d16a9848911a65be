"""JSON in a text that is still growing: where a value ends, and calls written as objects or lists of objects.

Checks no more of JSON than its strings and brackets; knows no markers around it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from noria.gateway.text.parsers.stream import Steps, TextStream

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[^\s,}\]<]*")

_HEADER = re.compile(
    r'\{\s*"(?:name|function)"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)', re.DOTALL
)
_MAX_HEADER = 2048
"""Characters in which a call that is passed on while it comes must have told its name."""


class JsonScan:
    """Finds the end of one object, list or string. `depth` is how many brackets are open already. `broken`: a `<`
    stood outside a string, which no JSON has and markers begin with."""

    def __init__(self, depth: int = 0) -> None:
        self.broken = False
        self._depth = depth
        self._in_string = self._escaped = False

    def advance(self, text: str, start: int = 0) -> tuple[int, bool]:
        """Scan `text` from `start` on: the place up to which it belongs to the value, and whether the value ends (or
        breaks off) there."""
        place = start
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                break
            place, mark = found.end(), found[0]
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._in_string = not self._in_string
            elif mark == "<":
                self.broken = True
                return found.start(), True
            else:
                self._depth += 1 if mark in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return place, True
        return len(text), False


def whole_value(stream: TextStream) -> Steps[str | None]:
    """Wait for one object, list or string and take it. Nothing is taken where it does not come to its end."""
    scan, scanned = JsonScan(), 0
    while True:
        scanned, over = scan.advance(stream.text, scanned)
        if over and not scan.broken:
            value, stream.text = stream.text[:scanned], stream.text[scanned:]
            return value
        if over or stream.ended:
            return None
        yield


def arguments(stream: TextStream) -> Steps[None]:
    """Pass the value that begins here on as arguments while it comes, up to where it ends or breaks off.

    Arguments that are a string with JSON in it, as some models write them, are that JSON; null is no arguments.
    """
    if stream.text.startswith('"'):
        text = yield from whole_value(stream)
        if text is None:
            text, stream.text = stream.text, ""
        stream.argue(_unquoted(text))
    elif stream.text.startswith(("{", "[")):
        yield from _flow(stream, JsonScan(), keep=True)
    else:
        while (match := _SCALAR.match(stream.text)) and match.end() == len(stream.text) and not stream.ended:
            yield
        scalar = "" if match is None else match[0]
        stream.text = stream.text[len(scalar) :]
        stream.argue("{}" if scalar == "null" else scalar)


def call_object(stream: TextStream, *, known_only: bool = False) -> Steps[bool]:
    """Take one call written as `{"name": …, "arguments": …}`; "parameters" is the same as "arguments".

    True where it is a call (of an allowed name, if `known_only`). Nothing is taken where it is not. The arguments are
    passed on while they come if the name stands before them.
    """
    scan, scanned = JsonScan(), 0
    while True:
        header = _HEADER.match(stream.text[:_MAX_HEADER])
        if header is not None:
            name = _unquoted(header[1])
            if known_only and name not in stream.allowed:
                return False
            stream.text = stream.text[header.end() :]
            stream.begin_call(name)
            yield from arguments(stream)
            yield from _flow(stream, JsonScan(depth=1), keep=False)
            return True
        scanned, over = scan.advance(stream.text, scanned)
        if over and not scan.broken:
            return _take_call(stream, scanned, known_only=known_only)
        if over or stream.ended:
            return False
        yield


def call_list(stream: TextStream, *, known_only: bool = False) -> Steps[bool]:
    """Take calls written as a list of objects. True if there was one; then what follows the last is left."""
    stream.text = stream.text[1:]  # the bracket
    space = yield from stream.blank()
    if not stream.text.startswith("{") or not (yield from call_object(stream, known_only=known_only)):
        stream.give_back("[" + space)
        return False
    while True:
        before = yield from stream.blank()
        if stream.text.startswith("]"):
            stream.text = stream.text[1:]
            return True
        if not stream.text.startswith(","):
            stream.give_back(before)
            return True
        stream.text = stream.text[1:]
        between = yield from stream.blank()
        if not stream.text.startswith("{") or not (yield from call_object(stream, known_only=known_only)):
            stream.give_back(before + "," + between)
            return True


def calls(stream: TextStream, *, known_only: bool = False) -> Steps[bool]:
    """Take a call or a list of calls, whichever begins here."""
    if stream.text.startswith("{"):
        return (yield from call_object(stream, known_only=known_only))
    if stream.text.startswith("["):
        return (yield from call_list(stream, known_only=known_only))
    return False


def _flow(stream: TextStream, scan: JsonScan, *, keep: bool) -> Steps[None]:
    """Take text up to the end of what is scanned; `keep` passes it on as arguments."""
    while True:
        place, over = scan.advance(stream.text)
        if keep:
            stream.argue(stream.text[:place])
        stream.text = stream.text[place:]
        if over or stream.ended:
            return
        yield


def _take_call(stream: TextStream, end: int, *, known_only: bool) -> bool:
    """A whole object that tells its name late, or is no call."""
    try:
        value: Any = json.loads(stream.text[:end])
    except (ValueError, RecursionError):
        return False
    name = value.get("name", value.get("function"))
    given = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not ("arguments" in value or "parameters" in value):
        return False
    if known_only and name not in stream.allowed:
        return False
    stream.text = stream.text[end:]
    stream.begin_call(name)
    stream.argue(given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False))
    return True


def _unquoted(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str) else text
