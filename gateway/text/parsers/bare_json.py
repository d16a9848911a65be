"""Calls as bare JSON: Llama 3's objects with "parameters", and models that simply write what they were told to.

Without a marker only the beginning of an answer can be a call, and only of a function that there is.
"""

from __future__ import annotations

import re

from noria.gateway.text.parsers.json_text import calls
from noria.gateway.text.parsers.stream import Steps, TextStream

PYTHON_TAG = "<|python_tag|>"
_FENCE = re.compile(r"```(?:json)?[ \t]*\n\s*(?=\S)")


def llama_json(stream: TextStream) -> Steps[None]:
    """Objects at the beginning or behind <|python_tag|>, one after another or with semicolons between them."""
    space = yield from stream.blank()
    called = yield from _objects(stream)
    if not called:
        stream.give_back(space)
    while True:
        found = yield from stream.until(PYTHON_TAG, drop_blank=called)
        if found is None:
            return
        space = yield from stream.blank()
        called = yield from _objects(stream)
        if not called:
            stream.say(found[0] + PYTHON_TAG + space)


def bare_json(stream: TextStream) -> Steps[None]:
    """Objects or a list of them at the beginning, maybe fenced as code."""
    space = yield from stream.blank()
    fence = None
    if stream.text.startswith("`"):
        fence = yield from stream.header(_FENCE, 64)
    called = yield from _objects(stream)
    if not called:
        stream.give_back(space + (fence[0] if fence else ""))
    elif fence:
        after = yield from stream.blank()
        if not (yield from stream.literal("```")):
            stream.give_back(after)
    yield from stream.until(drop_blank=called)


def _objects(stream: TextStream) -> Steps[bool]:
    if not (yield from calls(stream, known_only=True)):
        return False
    while True:
        between = yield from stream.blank()
        if stream.text.startswith((";", ",")):
            between, stream.text = between + stream.text[0], stream.text[1:]
            between += yield from stream.blank()
        if not (yield from calls(stream, known_only=True)):
            stream.give_back(between)
            return True
