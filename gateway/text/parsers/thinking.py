"""Thoughts between <think> and </think> in front of the answer, as DeepSeek R1, Qwen 3 and many others write them.

Knows no calls.
"""

from __future__ import annotations

from noria.gateway.text.parsers.stream import Steps, TextStream

OPEN, CLOSE = "<think>", "</think>"


def thinking(stream: TextStream, *, opened: bool) -> Steps[None]:
    """Take the thoughts, if the text begins with some. `opened`: the prompt ended inside them.

    White space around thoughts is theirs and no part of the answer.
    """
    stream.reasoning = opened
    space = yield from stream.blank()
    begun = yield from stream.literal(OPEN)
    if not begun and not opened:
        stream.give_back(space)
        return
    stream.reasoning = True
    yield from stream.blank()
    closed = yield from stream.until(CLOSE, out=stream.think)
    stream.reasoning = False
    if closed is not None:
        yield from stream.blank()
