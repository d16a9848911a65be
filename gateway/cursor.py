"""Event ids of a resumable stream, and which events a client that comes back has seen.

An id is `<completion id>/<mark>,<mark>,...` with one mark per choice, or `<completion id>/u` behind the usage. A mark
is the number of output tokens consumed so far; `-` before the choice began, `12t` behind text that came with the end,
`12e` behind the end itself. Marks of a choice only grow, and which events there are is decided by the tokens alone,
never by how they arrived: that is what makes going on exact. Knows no event's shape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Mark = tuple[int, int]
"""Tokens consumed, and 0 in between, 1 behind the last text, 2 behind the end."""

UNBEGUN: Mark = (-1, 0)
BEGUN: Mark = (0, 0)
TEXT = 1
END = 2

_SUFFIXES = ("", "t", "e")
_ID = re.compile(r"(?P<completion>[A-Za-z]+-[0-9a-f]{8,64})/(?:(?P<usage>u)|(?P<marks>[0-9te,-]+))\Z")
_MARK = re.compile(r"(?:(?P<unbegun>-)|(?P<tokens>[0-9]{1,9})(?P<suffix>[te]?))\Z")


class MalformedId(ValueError):
    """The text is no event id of ours."""


class Cursor:
    """Where one stream stands. `seen` are the marks that the client had when it came back."""

    def __init__(self, completion_id: str, num_choices: int, seen: Sequence[Mark] = (), *, usage_seen: bool = False):
        self._prefix = b"id: " + completion_id.encode() + b"/"
        self._seen = list(seen) or [UNBEGUN] * num_choices
        if len(self._seen) != num_choices:
            raise MalformedId(f"{len(self._seen)} marks for {num_choices} choices")
        self._marks = [_spelled(mark) for mark in self._seen]
        self._usage_seen = usage_seen

    def tag(self, event: bytes, index: int, mark: Mark) -> bytes:
        """The event with its id line; nothing where the client has it already."""
        if self._usage_seen or mark <= self._seen[index]:
            return b""
        self._marks[index] = _spelled(mark)
        return b"%s%s\n%s" % (self._prefix, b",".join(self._marks), event)

    def tag_usage(self, event: bytes) -> bytes:
        return b"" if self._usage_seen else b"%su\n%s" % (self._prefix, event)


def completion_of(event_id: str) -> str:
    """The completion that an event id belongs to. Raises MalformedId."""
    return _parsed(event_id)["completion"]


def resumed(event_id: str, num_choices: int) -> Cursor:
    """A cursor that goes on behind an event. Raises MalformedId."""
    found = _parsed(event_id)
    if found["usage"]:
        return Cursor(found["completion"], num_choices, usage_seen=True)
    return Cursor(found["completion"], num_choices, [_mark(text) for text in found["marks"].split(",")])


def _parsed(event_id: str) -> re.Match[str]:
    found = _ID.match(event_id)
    if found is None:
        raise MalformedId("not the id of an event of this server")
    return found


def _mark(text: str) -> Mark:
    found = _MARK.match(text)
    if found is None:
        raise MalformedId("not the id of an event of this server")
    return UNBEGUN if found["unbegun"] else (int(found["tokens"]), _SUFFIXES.index(found["suffix"]))


def _spelled(mark: Mark) -> bytes:
    tokens, stage = mark
    return b"-" if tokens < 0 else b"%d%s" % (tokens, _SUFFIXES[stage].encode())
