"""What an engine has recorded of each request that it holds, and the command that records one iteration more.

An iteration's frames go into the engine's journal whole; in turn each request's are folded into its own progress, so
that the journal stays short. Knows the script's arguments; knows no client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.engine.wire.connection import PROGRESS
from noria.engine.wire.publish import Row
from noria.engine.wire.slots import Command

FOLD_EVERY = 32
"""Exchanges between two foldings of a request, and so the entries that a journal has to keep (it has up to twice as
many). Fewer would make each iteration dearer, more the reading of the journal after a death."""


@dataclass(slots=True)
class _Request:
    """`recorded` is the state in the store when it was last folded, `seq` the output tokens in all its frames since."""

    epoch: int
    seq: int
    turn: int
    recorded: str = field(init=False)
    done: bool = False
    frames: list[bytes] = field(default_factory=list)  # since then, each behind its length

    def __post_init__(self) -> None:
        self.recorded = self.state

    @property
    def state(self) -> str:
        return f"{self.epoch} {self.seq}" + " done" * self.done


class Recorder:
    """One per engine. Rows are noted once, when they are handed in; `command` may be sent again until `stored`."""

    def __init__(self, pool: str, engine_id: str) -> None:
        self._pool = pool
        self._engine_id = engine_id
        self._requests: dict[str, _Request] = {}
        self._num_commands = 0
        self._num_opened = 0
        self._folding: list[_Request] = []
        self._all_due = False

    def open(self, request_id: str, epoch: int, seq: int) -> None:
        """From now on this engine's frames for the request are recorded, behind `seq` tokens that are."""
        self._num_opened += 1  # so that the requests that came together are not folded together
        self._requests[request_id] = _Request(epoch, seq, self._num_opened % FOLD_EVERY)

    def close(self, request_id: str) -> None:
        """The request has ended or is another engine's."""
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._requests.clear()
        self._folding.clear()
        self._all_due = False

    def note(self, rows: Sequence[Row]) -> None:
        """New frames."""
        requests = self._requests
        for row in rows:
            frame = row.frame
            request = requests.get(frame.request_id)
            if request is not None and request.epoch == frame.epoch:
                request.frames += (row.length, row.encoded)
                request.seq += len(frame.token_ids)
                request.done = request.done or frame.finish is not None

    def command(self, rows: Sequence[Row]) -> Command | None:
        """Records `rows`, all that are not known to be stored. None: there is nothing to record."""
        self._num_commands += 1
        turn = self._num_commands % FOLD_EVERY
        # One that has ended is gone from the store in a moment.
        due = {
            i: r for i, r in self._requests.items() if r.frames and (self._all_due or (r.turn == turn and not r.done))
        }
        self._folding = list(due.values())
        self._all_due = True  # until the reply is here
        if not rows and not due:
            return None
        frames = b"".join([piece for row in rows for piece in (row.length, row.encoded)])
        folds = [piece for i, r in due.items() for piece in (i, r.recorded, r.state, b"".join(r.frames))]
        return PROGRESS(self._pool, self._engine_id, frames, FOLD_EVERY, *folds)

    def stored(self) -> None:
        """The last command was carried out."""
        for request in self._folding:
            request.recorded = request.state
            request.frames.clear()
        self._folding.clear()
        self._all_due = False
