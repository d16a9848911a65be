"""DeepSeek's calls, in the words of V3 and R1 (a fenced block of JSON) and of V3.1 (name and arguments).

Knows no other markers.
"""

from __future__ import annotations

import re

from noria.gateway.text.parsers.json_text import arguments
from noria.gateway.text.parsers.stream import Steps, TextStream

ALL_OPEN, ALL_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HEADER = re.compile(
    rf"(?:function{SEPARATOR}(?P<fenced>[^\s`<]+)\s*```(?:json)?|(?P<plain>[^\s`<]+){SEPARATOR})\s*(?=\{{)"
)


def deepseek(stream: TextStream) -> Steps[None]:
    called = False
    while True:
        found = yield from stream.until(ALL_OPEN, OPEN, ALL_CLOSE, drop_blank=called)
        if found is None:
            return
        space, marker = found
        if marker == ALL_CLOSE and called:
            continue
        before = space + marker
        if marker == ALL_OPEN:
            before += yield from stream.blank()
            if not (yield from stream.literal(OPEN)):
                called = False
                stream.say(before)
                continue
            before += OPEN
        before += yield from stream.blank()
        header = None if marker == ALL_CLOSE else (yield from stream.header(_HEADER, 512))
        if header is None:
            called = False
            stream.say(before)
            continue
        called = True
        stream.begin_call(header["fenced"] or header["plain"])
        yield from arguments(stream)
        yield from _end(stream)


def _end(stream: TextStream) -> Steps[None]:
    taken = yield from stream.blank()
    if (yield from stream.literal("```")):
        taken += "```"
        taken += yield from stream.blank()
    if not (yield from stream.literal(CLOSE)):
        stream.give_back(taken)
