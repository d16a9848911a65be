"""Mistral's calls: [TOOL_CALLS] before a list of objects, or before a name and its arguments.

Knows no other markers.
"""

from __future__ import annotations

import re

from noria.gateway.text.parsers.json_text import arguments, calls
from noria.gateway.text.parsers.stream import Steps, TextStream

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,256})(?:\[CALL_ID\][A-Za-z0-9]+)?(?:\[ARGS\])?\s*(?=\{)")


def mistral(stream: TextStream) -> Steps[None]:
    called = False
    while True:
        found = yield from stream.until(OPEN, drop_blank=called)
        if found is None:
            return
        space = yield from stream.blank()
        called = yield from (calls(stream) if stream.text.startswith(("[", "{")) else _named(stream))
        if not called:
            stream.say(found[0] + OPEN + space)


def _named(stream: TextStream) -> Steps[bool]:
    match = yield from stream.header(_NAMED, 512)
    if match is None:
        return False
    stream.begin_call(match["name"])
    yield from arguments(stream)
    return True
