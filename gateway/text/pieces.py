"""What a model's text is made of: words for the user, thoughts, and calls of tools; and what takes it apart.

Knows no model's format, no tokens and no endpoint's shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """More of one call. Calls are numbered from 0 in the order they begin; `id` and `name` come with the first piece
    of a call and are None in all others; the `arguments` of all pieces join to the JSON text that the model wrote."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Piece = TextPiece | ReasoningPiece | ToolCallPiece


class OutputParser(Protocol):
    """Takes one growing text apart. However the text is split over calls, the pieces join to the same; no character
    is lost: what turns out to be no call is text. `reasoning` says whether the text stands inside thoughts now."""

    @property
    def reasoning(self) -> bool: ...

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds; what may still become something else is held back."""

    def finish(self) -> list[Piece]:
        """What is still held back. Called once, at the end of the text."""


@dataclass(slots=True)
class Call:
    """One whole call. `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """Pieces joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(pieces: Iterable[Piece]) -> Parts:
    """All pieces of a whole answer as one."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, Call] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, TextPiece):
            texts.append(piece.text)
        elif isinstance(piece, ReasoningPiece):
            thoughts.append(piece.text)
        else:
            if piece.index not in calls:
                calls[piece.index] = Call(piece.id or "", piece.name or "")
            arguments.setdefault(piece.index, []).append(piece.arguments)
    for index, call in calls.items():
        call.arguments = "".join(arguments[index])
    return Parts("".join(texts), "".join(thoughts), list(calls.values()))
