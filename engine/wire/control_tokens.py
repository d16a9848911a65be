"""Control tokens by their spelling: guard them in text that users wrote, cut rendered templates at the real ones.

This file knows no vocabulary, template or network; only spellings, ids and one guard character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Unicode White_Space, as in `tokenizers`; Python's own \s takes four control characters more.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_SPACE = f"[{_SPACES}]"


class ControlTokens:
    """Special added tokens of one tokenizer: the only ids that must never come out of a user's text.

    A guard is a character that no input contains. `guard` puts it inside every spelling that a user's string holds,
    and at an end of the string that could become a spelling together with its neighbour; `cut` then sees only the
    spellings that the template itself wrote. Removing the guard gives the text back exactly.
    """

    ids: dict[str, int]

    def __init__(self, added_tokens: Sequence[Mapping[str, Any]]) -> None:
        """`added_tokens`: entries of the same name in the `tokenizers` JSON; those not special are passed over."""
        special = [token for token in added_tokens if token.get("special") and token["content"]]
        self.ids = {str(token["content"]): int(token["id"]) for token in special}
        # Longest first: an alternation then finds the leftmost longest spelling, as the library does.
        special.sort(key=lambda token: len(token["content"]), reverse=True)
        self._special: list[Mapping[str, Any]] = special
        self._starts = _first_characters(list(self.ids))
        self._heads = {spelling[:n] for spelling in self.ids for n in range(1, len(spelling))}
        self._tails = {spelling[n:] for spelling in self.ids for n in range(1, len(spelling))}
        self._longest = max(map(len, self.ids), default=0)
        self._cuts: dict[str, re.Pattern[str]] = {}

    def guard(self, text: str, guard: str) -> str:
        """`text` with `guard` inside each control spelling and beside each end that could complete one."""
        if not self.ids or not text:
            return text
        reach = range(1, min(self._longest, len(text) + 1))
        open_end = any(text[-n:] in self._heads for n in reach)
        open_start = any(text[:n] in self._tails for n in reach)
        text = self._starts.sub(lambda match: match[0] + guard, text)
        return (guard if open_start else "") + text + (guard if open_end else "")

    def break_spellings(self, text: str) -> list[str]:
        """`text` in pieces, cut inside each control spelling, so that no piece holds a whole one."""
        cuts = [match.end() for match in self._starts.finditer(text)] if self.ids else []
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def cut(self, text: str, guard: str) -> Iterator[tuple[int, str, int | None]]:
        """(offset, text before, control id) for each unguarded spelling in order; the last id is None.

        `guard` ("" for none) is still inside the pieces. White space beside a token goes with the token where the
        model's files say so (`lstrip`, `rstrip`).
        """
        start = 0
        if self.ids:
            for match in self._pattern(guard).finditer(text):
                yield start, text[start : match.start()], self._id_of(match[0])
                start = match.end()
        yield start, text[start:], None

    def _id_of(self, matched: str) -> int:
        token_id = self.ids.get(matched)
        return self.ids[matched.strip(_SPACES)] if token_id is None else token_id

    def _pattern(self, guard: str) -> re.Pattern[str]:
        pattern = self._cuts.get(guard)
        if pattern is None:
            pattern = self._cuts[guard] = re.compile("|".join(_spelling(token, guard) for token in self._special))
        return pattern


def _spelling(token: Mapping[str, Any], guard: str) -> str:
    content: str = token["content"]
    pattern = re.escape(content)
    if len(content) == 1 and guard:
        pattern += f"(?!{guard})"  # nothing fits inside one character: its guard stands behind it
    if token.get("single_word"):
        pattern = rf"(?<!\w){pattern}(?!\w)"
    before = f"{_SPACE}*" if token.get("lstrip") else ""
    after = f"{_SPACE}*" if token.get("rstrip") else ""
    return f"{before}{pattern}{after}"


def _first_characters(spellings: list[str]) -> re.Pattern[str]:
    """Matches the first character of every spelling, overlapping ones included; starts with a literal, to be fast."""
    rests: dict[str, list[str]] = {}
    for spelling in spellings:
        rests.setdefault(spelling[0], []).append(re.escape(spelling[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)")
