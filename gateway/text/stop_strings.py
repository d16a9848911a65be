"""Stop strings in streamed text: cut exactly, hold back only what may still become one.

This file knows no tokens, requests or network. Matching is Aho and Corasick's automaton (CACM 1975).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class _State:
    """A prefix of a stop string; `longest` is the longest stop that ends here."""

    __slots__ = ("depth", "fail", "longest", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _State] = {}
        self.fail: _State = self
        self.longest = ""


class StopStrings:
    """Watches one growing text. The match that starts first wins; of two that start together, the shorter.

    A match is not final while an earlier start may still complete a longer stop string. However the text is split over
    calls, the emitted text is the same. Cost is linear in the text, whatever the number of stops.
    """

    stopped: bool  # a stop string was found; everything after is dropped
    matched: str | None  # which one

    def __init__(self, stops: Sequence[str] = (), *, include_stop_str_in_output: bool = False) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self.stopped = False
        self.matched = None
        self._include = include_stop_str_in_output
        self._active = bool(stops)
        self._held = ""  # text not emitted yet: from the start of the earliest candidate
        self._found: tuple[int, str] | None = None  # best complete match: start within `_held`, stop string
        if stops:
            self._root = self._state = _automaton(stops)
            self._first = re.compile("[" + "".join(re.escape(char) for char in self._root.next) + "]")

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found)."""
        if not self._active:
            return text, False
        if self.stopped:
            return "", True
        root, state = self._root, self._state
        position = len(self._held)
        buffer = self._held + text
        end = len(buffer)
        while position < end:
            if state is root:
                start = self._first.search(buffer, position)
                if start is None:
                    break
                position = start.start()
            char = buffer[position]
            position += 1
            while (following := state.next.get(char)) is None and state is not root:
                state = state.fail
            state = following or root
            if state.longest:
                start_of_match = position - len(state.longest)
                # Several end here: the longest starts first. A tie with the one found goes to the one found.
                if self._found is None or start_of_match < self._found[0]:
                    self._found = start_of_match, state.longest
            if self._found is not None and position - state.depth >= self._found[0]:
                return self._stop(buffer), True
        self._state = state
        # A found match that waits is inside the candidate: it starts later.
        keep = state.depth
        emit, self._held = buffer[: end - keep], buffer[end - keep :]
        if self._found is not None:
            self._found = self._found[0] - len(emit), self._found[1]
        return emit, False

    def flush(self) -> str:
        """What was held back, at the end of the text; `stopped` turns True if a complete match was waiting in it."""
        held = self._held
        if self._found is not None and not self.stopped:
            return self._stop(held)
        self._held = ""
        self._active = False
        return held

    def _stop(self, buffer: str) -> str:
        assert self._found is not None
        start, self.matched = self._found
        self.stopped = True
        self._held = ""
        return buffer[: start + len(self.matched)] if self._include else buffer[:start]


def _automaton(stops: Sequence[str]) -> _State:
    root = _State(0)
    for stop in stops:
        state = root
        for char in stop:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.longest = stop
    queue = deque(root.next.values())
    for state in queue:
        state.fail = root
    while queue:
        state = queue.popleft()
        for char, child in state.next.items():
            fail = state.fail
            while char not in fail.next and fail is not root:
                fail = fail.fail
            child.fail = fail.next.get(char, root)
            child.longest = child.longest or child.fail.longest
            queue.append(child)
    return root
