"""Text that comes piece by piece, read by a parser that is written as if all of it were there.

A format is a generator over a `TextStream`: where it needs more text it yields, and it never looks at how the text was
cut; that is why any cut gives the same. Knows no format.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from noria.gateway.text.pieces import Piece, ReasoningPiece, TextPiece, ToolCallPiece

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields where it waits for more text or for its end; returns what it has read."""

_BLANK = re.compile(r"\s*")


class TextStream:
    """`text` is what has come and is not yet taken; `ended`: nothing more will come. `allowed` are the names that may
    be called where only a name tells a call from other text."""

    def __init__(self, seed: str, allowed: frozenset[str] = frozenset()) -> None:
        self.text = ""
        self.ended = False
        self.reasoning = False
        self.allowed = allowed
        self.num_calls = 0
        self._seed = seed
        self._pieces: list[Piece] = []

    def take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def say(self, text: str) -> None:
        if text:
            self._pieces.append(TextPiece(text))

    def think(self, text: str) -> None:
        if text:
            self._pieces.append(ReasoningPiece(text))

    def begin_call(self, name: str) -> None:
        """The next call. Its id follows from the seed, so that the same answer has the same ids again."""
        made = hashlib.sha256(f"{self._seed}/{self.num_calls}".encode()).hexdigest()[:24]
        self._pieces.append(ToolCallPiece(self.num_calls, f"call_{made}", name, ""))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """More of the arguments of the call that was begun last."""
        if text:
            self._pieces.append(ToolCallPiece(self.num_calls - 1, None, None, text))

    def give_back(self, text: str) -> None:
        """What was taken too much."""
        self.text = text + self.text

    def blank(self) -> Steps[str]:
        """Take white space, up to something else or the end."""
        taken = ""
        while True:
            match = _BLANK.match(self.text)
            assert match is not None
            taken += match[0]
            self.text = self.text[match.end() :]
            if self.text or self.ended:
                return taken
            yield

    def literal(self, wanted: str) -> Steps[bool]:
        """Take exactly this text, if it comes next."""
        while len(self.text) < len(wanted) and wanted.startswith(self.text) and not self.ended:
            yield
        if not self.text.startswith(wanted):
            return False
        self.text = self.text[len(wanted) :]
        return True

    def header(self, pattern: re.Pattern[str], limit: int = 1024) -> Steps[re.Match[str] | None]:
        """Take what the pattern matches at this place within so many characters. The pattern must not match a shorter
        text in another way than the whole: let it look ahead at what follows."""
        while True:
            match = pattern.match(self.text[:limit])
            if match is not None:
                self.text = self.text[match.end() :]
                return match
            if len(self.text) >= limit or self.ended:
                return None
            yield

    def until(
        self, *markers: str, out: Callable[[str], None] | None = None, drop_blank: bool = False
    ) -> Steps[tuple[str, str] | None]:
        """Pass text on (to `say` if not told otherwise) up to the first marker, which is taken.

        Returns the white space in front of the marker, which is not passed on, and the marker; None at the end of the
        text. With `drop_blank` a text that is nothing but white space up to its end is dropped. No marker may begin
        another.
        """
        out = out or self.say
        whole, partial = _patterns(markers)
        silent = True
        while True:
            found = whole.search(self.text)
            if found is not None:
                said = self.text[: found.start()].rstrip()
                out(said)
                space = self.text[len(said) : found.start()]
                self.text = self.text[found.end() :]
                return space, found[0]
            if self.ended:
                if not (drop_blank and silent and not self.text.strip()):
                    out(self.text)
                self.text = ""
                return None
            tail = partial.search(self.text)
            said = self.text[: len(self.text) if tail is None else tail.start()].rstrip()
            if said:
                silent = False
                out(said)
                self.text = self.text[len(said) :]
            yield


@lru_cache(maxsize=64)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds a marker, and what finds the beginning of one at the end of a text."""
    heads = sorted({marker[:n] for marker in markers for n in range(1, len(marker))}, key=len, reverse=True)
    partial = "|".join(map(re.escape, heads)) or "(?!)"
    return re.compile("|".join(map(re.escape, markers)) or "(?!)"), re.compile(f"(?:{partial})\\Z")


class StepsParser:
    """An `OutputParser` made of steps. `max_calls` is how many calls are passed on (None: all)."""

    def __init__(self, stream: TextStream, steps: Steps[None], max_calls: int | None = None) -> None:
        self._stream = stream
        self._steps: Steps[None] | None = steps
        self._max_calls = max_calls
        self._advance()

    @property
    def reasoning(self) -> bool:
        return self._stream.reasoning

    def feed(self, text: str) -> list[Piece]:
        self._stream.text += text
        return self._advance()

    def finish(self) -> list[Piece]:
        self._stream.ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        if self._steps is None:  # whatever comes after the format's end is text
            self._stream.say(self._stream.text)
            self._stream.text = ""
        pieces = self._stream.take_pieces()
        if self._max_calls is None:
            return pieces
        return [p for p in pieces if not isinstance(p, ToolCallPiece) or p.index < self._max_calls]
