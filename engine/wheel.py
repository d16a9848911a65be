"""Shows the turning wheel to whoever watches, from a thread of its own, beside the forward pass.

While nobody watches, an iteration pays for one look at a flag. Knows no HTTP and no reader.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from noria.engine.lanes import Lanes
from noria.engine.live import LiveRequest
from noria.engine.scheduling.batch import Batch, BatchRow
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.trace import Times
from noria.engine.wire.broker import BrokerUnavailable, StoreFault
from noria.engine.wire.wheel import WheelChannel, WheelIteration, WheelNews, WheelRequest, WheelRow

PUBLISH_EVERY = 0.05  # seconds between messages while somebody watches
LOOK_EVERY = 1.0  # seconds between messages that only ask whether anybody does, and show that the engine is there
MAX_TURNS = 16  # iterations in a message: of more, the latest
CLOSE_SECONDS = 6.0  # a message takes five at most


class _Turn(NamedTuple):
    """What the loop hands over; everything that may change until it is published is copied."""

    number: int
    at: float
    rows: Sequence[BatchRow]
    lives: Sequence[LiveRequest]
    running: tuple[Request, ...]
    waiting: int
    blocks_used: int
    forward: float  # seconds


class Wheel:
    """`watched` is true while somebody watches: only then is `record` to be called. `bare` is a message without
    iterations, which says what does not change."""

    def __init__(self, channel: WheelChannel, bare: WheelNews) -> None:
        self.watched = False
        self._channel = channel
        self._bare = bare
        self._count = 0
        self._turns: deque[_Turn] = deque(maxlen=MAX_TURNS)
        self._lanes = Lanes()
        self._published = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="noria-wheel", daemon=True)
        self._thread.start()

    def record(self, batch: Batch, lives: Sequence[LiveRequest], scheduler: Scheduler, times: Times) -> None:
        """Note an iteration whose results the scheduler has just folded back. `lives` belong to the batch's rows."""
        self._count += 1
        self._turns.append(
            _Turn(
                self._count,
                time.time(),
                batch.rows,
                lives,
                tuple(scheduler.running),
                len(scheduler.waiting),
                scheduler.kv.num_held,
                times.forward,
            )
        )

    def close(self) -> None:
        """Stop publishing."""
        self._ended.set()
        self._thread.join(CLOSE_SECONDS)
        self._channel.close()

    def _run(self) -> None:
        while not self._ended.wait(PUBLISH_EVERY if self.watched else LOOK_EVERY):
            turns = self._taken()
            if not turns and time.monotonic() - self._published < LOOK_EVERY:
                continue
            try:
                watched = self._channel.publish(self._news(turns)) > 0
            except (BrokerUnavailable, StoreFault):  # the loop tells of it
                watched = False
            self._published = time.monotonic()
            if not watched:
                self._lanes = Lanes()
            self.watched = watched

    def _taken(self) -> list[_Turn]:
        turns = []
        while self._turns:  # the loop may add some meanwhile, which then come along
            turns.append(self._turns.popleft())
        return turns

    def _news(self, turns: Sequence[_Turn]) -> WheelNews:
        places: dict[Request, int] = {}
        requests: list[WheelRequest] = []
        iterations = []
        for turn in turns:
            for row, live in zip(turn.rows, turn.lives, strict=True):
                if row.request not in places:
                    places[row.request] = len(requests)
                    requests.append(_introduced(live))
            iterations.append(self._iteration(turn, places))
        return msgspec.structs.replace(self._bare, at=round(time.time(), 3), requests=requests, iterations=iterations)

    def _iteration(self, turn: _Turn, places: dict[Request, int]) -> WheelIteration:
        running = frozenset(turn.running)
        rows = [self._row(row, places[row.request], row.request in running) for row in turn.rows]
        self._lanes.keep(running)
        return WheelIteration(
            number=turn.number,
            at=round(turn.at, 4),
            forward_us=round(1e6 * turn.forward),
            blocks_used=turn.blocks_used,
            waiting=turn.waiting,
            rows=rows,
        )

    def _row(self, row: BatchRow, place: int, stays: bool) -> WheelRow:
        return WheelRow(
            lane=self._lanes.of(row.request),
            request=place,
            phase=row.phase,
            num_tokens=row.num_tokens,
            context=row.start + row.num_tokens,
            end="" if stays else row.request.finish or "preempted",
        )


def _introduced(live: LiveRequest) -> WheelRequest:
    request, scheduled = live.claimed.request, live.scheduled
    return WheelRequest(
        id=request.id,
        tenant=request.tenant,
        service_class=request.service_class,
        prompt_tokens=scheduled.num_prompt,
        cached_tokens=scheduled.num_cached,
        max_tokens=scheduled.max_tokens,
    )
