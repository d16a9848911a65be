"""The content of one message as it grows: blocks made of an answer's pieces, and the events that say so.

Pure: what is streamed and what is not come from here, so that they are the same. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from pydantic_core import from_json

from noria.gateway.choice import Delta
from noria.gateway.text.pieces import Piece, ReasoningPiece, TextPiece, ToolCallPiece

Shown = dict[str, Any]


class Tell(Protocol):
    """Where events go."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


class Blocks:
    """`content` is whole once `end` was called. Blocks follow each other: one ends where the next begins. Thoughts that
    are not shown are a block of nothing."""

    def __init__(self, *, parsed: bool, shows_thoughts: bool, tell: Tell) -> None:
        self.content: list[Shown] = []
        self.has_calls = False
        self._parsed = parsed
        self._shows_thoughts = shows_thoughts
        self._tell = tell
        self._kind = ""  # of the block that is open
        self._call = -1
        self._texts: list[str] = []

    def add(self, delta: Delta) -> None:
        """Take in what is new. Where no parser takes the text apart, all of it is for the user."""
        pieces: Iterable[Piece] = delta.pieces if self._parsed else [TextPiece(delta.text)] if delta.text else []
        for piece in pieces:
            self._add(piece)

    def end(self) -> None:
        """The answer is over."""
        if not self._kind:
            return
        block, text = self.content[-1], "".join(self._texts)
        if self._kind == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[self._kind] = text
        self._tell("content_block_stop", index=len(self.content) - 1)
        self._kind, self._texts = "", []

    def _add(self, piece: Piece) -> None:
        if isinstance(piece, ToolCallPiece):
            if self._kind != "tool_use" or piece.index != self._call:
                self._call, self.has_calls = piece.index, True
                call_id = "toolu_" + (piece.id or "").removeprefix("call_")
                self._begin("tool_use", {"id": call_id, "name": piece.name or "", "input": {}})
            self._grow(piece.arguments, "input_json_delta", "partial_json")
        elif isinstance(piece, ReasoningPiece):
            if self._kind != "thinking":
                self._begin("thinking", {"thinking": "", "signature": ""})
            if self._shows_thoughts:
                self._grow(piece.text, "thinking_delta", "thinking")
        else:
            if self._kind != "text":
                self._begin("text", {"text": ""})
            self._grow(piece.text, "text_delta", "text")

    def _begin(self, kind: str, fields: Shown) -> None:
        self.end()
        self._kind = kind
        self.content.append({"type": kind, **fields})
        self._tell("content_block_start", index=len(self.content) - 1, content_block=self.content[-1])

    def _grow(self, text: str, kind: str, field: str) -> None:
        if text:
            self._texts.append(text)
            self._tell("content_block_delta", index=len(self.content) - 1, delta={"type": kind, field: text})


def _arguments(text: str) -> dict[str, Any]:
    """What a model wrote as the input of a call, which this API shows as an object: as far as it goes, where it was cut
    off, and an empty one where it is none."""
    try:
        found = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
