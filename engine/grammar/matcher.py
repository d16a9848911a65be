"""Follows one request's output through its grammar and says what may come next, as bit masks.

The masks are made on a thread beside the loop while the model computes. Knows no request and no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.engine.execution.step import NoMask
from noria.engine.grammar import binding

PATIENCE = 1.0
"""Seconds that an iteration waits for a mask once the logits are there; as a rule the mask was there first."""

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Makes a matcher for each request that asks for this grammar."""

    handle: Any
    vocab_size: int
    filler: MaskFiller

    def matcher(self, delivered: Sequence[int] = ()) -> Matcher:
        """At the beginning, or after what was delivered already. Raises GrammarError where that does not match."""
        matcher = Matcher(self.handle, self.vocab_size, self.filler)
        if not matcher.accept(delivered):
            raise binding.GrammarError("the output so far does not match the grammar")
        return matcher

    @property
    def num_bytes(self) -> int:
        return int(self.handle.memory_size_bytes())


class Matcher:
    """The state of one output. `accept` and `mask` are called in turns, by one thread at a time."""

    def __init__(self, grammar: Any, vocab_size: int, filler: MaskFiller) -> None:
        self._handle = binding.new_matcher(grammar)
        self._num_words = -(-vocab_size // 32)
        self._filler = filler

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take in what was chosen. False: the grammar does not allow it."""
        return all(self._handle.accept_token(token_id, False) for token_id in token_ids)

    def mask(self, drafts: Sequence[int] = ()) -> PendingMask:
        """What may come next, and after each of `drafts` in turn: one mask more than there are drafts."""
        return PendingMask(self._filler, self, drafts)

    def fill(self, drafts: Sequence[int] = ()) -> Words:
        """Bits of the allowed ids, int32 [1 + len(drafts), ceil(vocab / 32)]. After a draft that the grammar does not
        allow nothing is: it will not be kept."""
        words: Words = np.zeros((1 + len(drafts), self._num_words), np.int32)
        accepted = 0
        try:
            for place in range(1 + len(drafts)):
                if self._handle.is_terminated():
                    break
                # False says that everything is allowed, and may leave the row as it was.
                if not self._handle.fill_next_token_bitmask(words, place, False):
                    words[place] = -1
                if place == len(drafts) or not self._handle.accept_token(drafts[place], False):
                    break
                accepted += 1
        finally:
            if accepted:
                self._handle.rollback(accepted)
        return words


class PendingMask:
    """A mask being made."""

    def __init__(self, filler: MaskFiller, matcher: Matcher, drafts: Sequence[int]) -> None:
        self._filler = filler
        self._fill = functools.partial(matcher.fill, drafts)
        self._future = filler.submit(self._fill)

    def words(self) -> Words:
        """As `Matcher.fill`; waits, but not for ever. Raises NoMask: the matcher must not be used again."""
        try:
            return self._future.result(PATIENCE)
        except CancelledError:
            return self._fill()
        except FutureTimeout:
            if self._future.cancel():  # it never had its turn
                return self._fill()
            self._filler.replace()
            raise NoMask("the grammar is too ambiguous: what may come next could not be found in time") from None


class MaskFiller:
    """The thread that makes masks, in the order of the rows. One that does not come back is left to itself."""

    def __init__(self) -> None:
        self._pool = self._new_pool()

    def submit(self, fill: Callable[[], Words]) -> Future[Words]:
        return self._pool.submit(fill)

    def replace(self) -> None:
        """Another thread from now on; what waits for the old one is cancelled."""
        stuck, self._pool = self._pool, self._new_pool()
        stuck.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="noria-masks")
