"""Calls as JSON objects between <tool_call> and </tool_call>: Hermes, Qwen 2.5 and 3, SmolLM2, and Noria's own words
for models that know no format. Knows no other markers.
"""

from __future__ import annotations

from noria.gateway.text.parsers.json_text import calls
from noria.gateway.text.parsers.stream import Steps, TextStream

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def tagged_json(stream: TextStream) -> Steps[None]:
    called = False
    while True:
        found = yield from stream.until(OPEN, drop_blank=called)
        if found is None:
            return
        space = yield from stream.blank()
        if not (yield from calls(stream)):
            stream.say(found[0] + OPEN + space)
            called = False
            continue
        called = True
        after = yield from stream.blank()
        if not (yield from stream.literal(CLOSE)):
            stream.give_back(after)
