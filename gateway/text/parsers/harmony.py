"""Harmony, the format of gpt-oss: messages in channels, of which thoughts, calls and the answer are three.

Knows no other format; between messages nothing is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from noria.gateway.text.parsers.stream import Steps, TextStream

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_HEADER = re.compile(
    r"(?=<\|(?:start|channel)\|>)(?:<\|start\|>)?"
    r"(?P<head>(?:(?!<\|(?:message|start|end|call|return)\|>).)*)<\|message\|>",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")


def harmony(stream: TextStream) -> Steps[None]:
    """The prompt ends behind `<|start|>assistant`, so that a message begins with its channel."""
    while True:
        yield from stream.blank()
        if not stream.text:
            return
        if stream.text[0] != "<":
            if not (yield from _message(stream, stream.say)):
                return
            continue
        header = yield from stream.header(_HEADER)
        if header is None:  # a marker that begins no message is text
            stream.say(stream.text[0])
            stream.text = stream.text[1:]
            more = yield from _message(stream, stream.say)
        else:
            more = yield from _content(stream, header["head"])
        if not more:
            return


def _content(stream: TextStream, head: str) -> Steps[bool]:
    channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
    if recipient is not None:
        stream.begin_call(recipient[1])
        return (yield from _message(stream, stream.argue))
    if channel is not None and channel[1] == "analysis":
        stream.reasoning = True
        more = yield from _message(stream, stream.think)
        stream.reasoning = False
        return more
    return (yield from _message(stream, stream.say))


def _message(stream: TextStream, out: Callable[[str], None]) -> Steps[bool]:
    """Pass a message on up to its end. False at the end of everything."""
    found = yield from stream.until(*ENDS, START, CHANNEL, out=out)
    if found is not None and found[1] in (START, CHANNEL):
        stream.give_back(found[1])
    return found is not None
