"""Carries grammars' masks to a rank that samples elsewhere: a step names them by number, and they follow.

Knows bits and numbers; no grammar, no step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from noria.engine.execution.step import Mask, NoMask

Sent = tuple[int, bytes] | str
"""Positions and their words; or why there is no mask."""


class OutgoingMasks:
    """Numbers the masks of steps and has a thread send them as soon as they are known, in the order of the steps."""

    def __init__(self, send: Callable[[dict[int, Sent]], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[int, Mask]] = {}  # by identity: rows with guesses share one
        self._queue: SimpleQueue[list[tuple[int, Mask]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="noria-masks-out", daemon=True)
        self._thread.start()

    def number_of(self, mask: Mask) -> int:
        """Called while a step is being encoded."""
        if id(mask) not in self._pending:
            self._pending[id(mask)] = next(self._numbers), mask
        return self._pending[id(mask)][0]

    def follow(self) -> None:
        """The step is on its way: its masks may follow."""
        if self._pending:
            self._queue.put(list(self._pending.values()))
            self._pending = {}

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            self._send({number: _words(mask) for number, mask in pending})


def _words(mask: Mask) -> Sent:
    try:
        words = mask.words()
    except NoMask as error:
        return str(error)
    return len(words), np.ascontiguousarray(words).tobytes()


class IncomingMasks:
    """Gives the rows of steps their masks, which come later. One that no step waits for any more is forgotten."""

    def __init__(self) -> None:
        self._expected: WeakValueDictionary[int, ComingMask] = WeakValueDictionary()

    def mask(self, number: int) -> ComingMask:
        """Called while a step is being decoded."""
        mask = self._expected.get(number)
        if mask is None:
            self._expected[number] = mask = ComingMask()
        return mask

    def put(self, masks: Mapping[int, Sent]) -> None:
        for number, sent in masks.items():
            mask = self._expected.get(number)
            if mask is not None:
                mask.come(sent)


class ComingMask:
    """See `step.Mask`."""

    def __init__(self) -> None:
        self._sent: SimpleQueue[Sent] = SimpleQueue()
        self._words: Sent | None = None

    def come(self, sent: Sent) -> None:
        self._sent.put(sent)

    def words(self) -> NDArray[np.int32]:
        """Waits until it is here: what is sent is a mask or a reason, within the sender's patience. Called by one
        thread."""
        if self._words is None:
            self._words = self._sent.get()
        if isinstance(self._words, str):
            raise NoMask(self._words)
        positions, words = self._words
        return np.frombuffer(words, np.int32).reshape(positions, -1)
