"""Random outputs of a grammar: tokens drawn from those that the masks allow, with a bent for those that end things.

Knows no model: what a model would choose is a part of what may come out here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from noria.engine.grammar.matcher import CompiledGrammar, Words
from noria.engine.wire.tokenizer import Tokenizer

ENDING, TURNING = 0.35, 0.15
"""Chances to take a token that closes something, and one without letters or digits, where one is allowed: else no
string would ever end."""


def allowed(words: Words, vocab_size: int) -> NDArray[np.int64]:
    """Ids of the set bits of one mask."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size))


class Walker:
    """Walks of one model's grammars. `stop` is its end-of-sequence token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop = stop
        closing = [set(tokenizer.token_bytes(i)) <= set(b'"}],') for i in range(vocab_size)]
        self._closes = np.array(closing) & (np.arange(vocab_size) != stop)
        turning = [not re.search(rb"[0-9A-Za-z\x80-\xff]", tokenizer.token_bytes(i)) for i in range(vocab_size)]
        self._turns = np.array(turning) & (np.arange(vocab_size) != stop)

    def text(self, grammar: CompiledGrammar, *, seed: int, most: int = 600) -> str | None:
        """One output; None where `most` tokens do not end it."""
        matcher, chance, tokens = grammar.matcher(), np.random.default_rng(seed), []
        while len(tokens) < most:
            ids = allowed(matcher.fill()[0], self._vocab_size)
            assert len(ids), "a dead end"
            if ids[np.searchsorted(ids, self._stop) % len(ids)] == self._stop and chance.random() < 0.5:
                ids = np.array([self._stop])
            elif chance.random() < ENDING and self._closes[ids].any():
                ids = ids[self._closes[ids]]
            elif chance.random() < TURNING and self._turns[ids].any():
                ids = ids[self._turns[ids]]
            token = int(chance.choice(ids))
            assert matcher.accept([token]), "the mask allowed what the matcher refuses"
            if token == self._stop:
                assert not matcher.fill().any()
                return self._tokenizer.decode(tokens)
            tokens.append(token)
        return None

    def texts(self, grammar: CompiledGrammar, num: int, *, most: int = 600) -> Iterator[str]:
        """Those of `num` outputs that came to an end."""
        for seed in range(num):
            text = self.text(grammar, seed=seed, most=most)
            if text is not None:
                yield text
