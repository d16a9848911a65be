"""The output of one response as it grows: items made of an answer's deltas, and the events that say so.

Pure: what is streamed and what is not come from here, so that they are the same. Knows no store and no tokens' text
beyond what a tokenizer spells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from noria.gateway.choice import Delta, Ended, ScoredToken
from noria.gateway.responses import ids
from noria.gateway.responses.events import EventWriter
from noria.gateway.responses.parts import CallPart, Entry, MessagePart, Part, ReasoningPart, Shown, part_of
from noria.gateway.text.pieces import Piece, ReasoningPiece, TextPiece, ToolCallPiece

Logprobs = Callable[[Sequence[ScoredToken]], Sequence[Entry]]
"""How log-probabilities are shown."""


class OutputItems:
    """`items` are whole once `end` was called. Items follow each other: one ends where the next begins."""

    def __init__(self, group: str, *, parsed: bool, logprobs: Logprobs | None, events: EventWriter | None) -> None:
        self.items: list[Shown] = []
        self._group = group
        self._parsed = parsed
        self._logprobs = logprobs
        self._events = events
        self._open: Part | None = None
        self._call = -1  # the call that is open
        self._scores: list[ScoredToken] = []  # of tokens whose text has not come yet

    def add(self, delta: Delta) -> None:
        """Take in what is new. Where no parser takes the text apart, all of it is for the user."""
        if delta.tokens:
            self._scores += delta.tokens
        if self._parsed:
            for piece in delta.pieces:
                self._add(piece)
        elif delta.text:
            self._say(delta.text)

    def end(self, finish: Ended | None) -> None:
        """The answer is over; what was cut off by its length is incomplete. An answer of nothing is one
        empty message."""
        if not self.items:
            self._begin(MessagePart())
        if self._open is not None:
            if self._scores and isinstance(self._open, MessagePart):
                self._open.grow("", self._take_scores(), self._events)
            self._close("incomplete" if finish == "length" else "completed")

    def _add(self, piece: Piece) -> None:
        if isinstance(piece, TextPiece):
            return self._say(piece.text)
        self._scores = []  # only text for the user shows them
        if isinstance(piece, ReasoningPiece):
            if not isinstance(self._open, ReasoningPart):
                self._begin(ReasoningPart())
        elif piece.index != self._call or not isinstance(self._open, CallPart):
            self._call = piece.index
            self._begin(CallPart(piece.id or "", piece.name or ""))
        assert self._open is not None
        self._open.grow(piece.arguments if isinstance(piece, ToolCallPiece) else piece.text, [], self._events)

    def _say(self, text: str) -> None:
        part = self._open
        if not isinstance(part, MessagePart):
            part = MessagePart()
            self._begin(part)
        part.grow(text, self._take_scores(), self._events)

    def _take_scores(self) -> Sequence[Entry]:
        if not self._scores or self._logprobs is None:
            return []
        scores, self._scores = self._scores, []
        return self._logprobs(scores)

    def _begin(self, part: Part) -> None:
        self._close("completed")
        place = len(self.items)
        self._open = part
        part.begin(ids.output_item(self._group, part.kind, place), place, self._events)
        self.items.append(part.item("in_progress"))

    def _close(self, status: str) -> None:
        if self._open is not None:
            self.items[-1] = self._open.end(status, self._events)
            self._open = None


def replay(items: Sequence[Shown], events: EventWriter) -> None:
    """The events of whole items, each in one delta."""
    for place, item in enumerate(items):
        part, text, logprobs = part_of(item)
        part.begin(item["id"], place, events)
        part.grow(text, logprobs, events)
        part.end(item["status"], events)
