"""Guesses a request's next tokens from tokens that it has: prompt-lookup speculation, adaptive for each request.

Proposes and keeps accounts; whether a guess is right is for execution to say. Integers only, knows no model.

After "Prompt Lookup Decoding" (Saxena, 2023): where the last few tokens occurred before, what followed then may follow
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NGRAMS = (4, 3, 2)
"""Lengths of the endings that are looked up, the surest first."""

BREAK_EVEN_ROWS = 16
"""Rows of an iteration that cost as much as reading the weights once. A guess costs about one row, a right one saves a
row and the share of an iteration: so among n rows guessing pays when more than n / (n + BREAK_EVEN_ROWS) of the guesses
are right, 6 % alone, half of them among 16."""

MEMORY = 32
"""Guesses after which an older one counts half."""

PAUSE = 64
"""Tokens for which a request for which guessing does not pay is left alone before it is tried again."""

_UNKNOWN = (8.0, 4.0)  # guesses, and how many of them are taken to be right, of a request not known yet


@dataclass(slots=True)
class SpeculationCounts:
    """Tokens since the start."""

    drafted: int = 0
    accepted: int = 0


class Drafter:
    """Drafts for one request, from its own tokens and from `prediction`, a guess of the whole output."""

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._prediction = _Passage(prediction)
        self._own = _Passage([])
        self._followed: int | None = 0  # how far the output has followed the prediction, while it does
        self._predicted = False  # whether the last draft came from the prediction
        self._right = self._wrong = 0  # of the prediction's tokens that were tried
        self.resume_at = 0  # number of tokens before which nothing is proposed
        self._drafted, self._accepted = _UNKNOWN

    def propose(self, tokens: list[int], num_prompt: int, limit: int, num_rows: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow `tokens`, in an iteration of `num_rows` rows; none where guessing does
        not pay."""
        if limit <= 0 or len(tokens) < self.resume_at:
            return ()
        if self._accepted * (num_rows + BREAK_EVEN_ROWS) < self._drafted * num_rows:
            self.resume_at = len(tokens) + PAUSE
            self._drafted, self._accepted = _UNKNOWN
            return ()
        draft = self._from_prediction(tokens, num_prompt, limit)
        self._predicted = bool(draft)
        return draft or self._own.continuation(tokens, tokens, limit)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of what became of a draft."""
        keep = 0.5 ** (num_drafted / MEMORY)
        self._drafted = self._drafted * keep + num_drafted
        self._accepted = self._accepted * keep + num_accepted
        if self._predicted:
            self._right += num_accepted
            self._wrong += num_drafted - num_accepted

    def take_predicted(self) -> tuple[int, int] | None:
        """How many tokens of the prediction were tried since the last call: right ones, wrong ones. None: none."""
        if not self._right and not self._wrong:
            return None
        tried, self._right, self._wrong = (self._right, self._wrong), 0, 0
        return tried

    def _from_prediction(self, tokens: list[int], num_prompt: int, limit: int) -> tuple[int, ...]:
        predicted = self._prediction.tokens
        if not predicted:
            return ()
        output = len(tokens) - num_prompt
        if self._followed is not None:
            if list(predicted[self._followed : output]) == tokens[num_prompt + self._followed :]:
                self._followed = output
                return tuple(predicted[output : output + limit])
            self._followed = None
        return self._prediction.continuation(predicted, tokens, limit)


class _Passage:
    """A run of tokens in which endings are looked up. It may grow between calls."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._next_by_ending: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def continuation(self, passage: Sequence[int], tokens: list[int], limit: int) -> tuple[int, ...]:
        """What came after the last place in `passage` that ends as `tokens` do, `limit` tokens at most. Where the place
        is so near the end that nothing more came, the repetition is taken to go on."""
        self._read(passage)
        for length in NGRAMS:
            start = self._next_by_ending.get(tuple(tokens[-length:]))
            if start is not None:
                found = list(passage[start : start + limit])
                period = len(found)
                while len(found) < limit and passage is tokens:
                    found.append(found[-period])
                return tuple(found)
        return ()

    def _read(self, passage: Sequence[int]) -> None:
        """Note every ending that has something behind it. The latest place counts."""
        places = self._next_by_ending
        for end in range(max(self._num_read, 1), len(passage)):
            for length in NGRAMS:
                if end >= length:
                    places[tuple(passage[end - length : end])] = end
        self._num_read = max(self._num_read, len(passage))
