"""The executor of a model on several ranks, as rank 0 has it: steps to all of them at once, results from the last.

Sees to it that the others are alive. Knows no policy and no model; who starts the ranks is `rendezvous`.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from signal import Signals

import structlog

from noria.engine.execution.control import (
    Answer,
    Broken,
    Failed,
    FromRank,
    Line,
    LineClosed,
    Masks,
    Ping,
    Ready,
    Step,
    decode_from_rank,
    encode,
)
from noria.engine.execution.executor import RankLost
from noria.engine.execution.masks import OutgoingMasks
from noria.engine.execution.stage import Stage
from noria.engine.execution.step import RowOutput, StepInput
from noria.engine.parallel import Parallel

log = structlog.get_logger("noria.engine")

PINGS_PER_LEASE = 4
BROKEN_SECONDS = 1.0  # after a broken data channel, until whose end broke it should be known
END_SECONDS = 5.0  # for the ranks to end by themselves


class StepFailed(Exception):
    """The ranks could not compute a step."""


class RankExecutor:
    """See `executor.Executor`. `lines` are the control channels by rank, `processes` the ranks that were started here;
    one that says nothing for three quarters of `lease_seconds` is lost."""

    def __init__(
        self,
        parallel: Parallel,
        lines: Mapping[int, Line],
        processes: Mapping[int, subprocess.Popen[bytes]],
        lease_seconds: float,
    ) -> None:
        self.depth = parallel.pp
        self.lines = lines
        self._parallel = parallel
        self._processes = processes
        self._lease = lease_seconds
        self._patience = lease_seconds * (PINGS_PER_LEASE - 1) / PINGS_PER_LEASE  # over before the lease is
        self._stage: Stage | None = None
        self._masks: OutgoingMasks | None = None
        if parallel.sampling_rank:
            self._masks = OutgoingMasks(lambda masks: self._send(parallel.sampling_rank, Masks(masks)))
        self._out: deque[int] = deque()
        self._number = 0
        self._changed = threading.Condition()  # guards what follows
        self._answers: dict[int, Answer] = {}
        self._ready: set[int] = set()
        self._lost: Exception | None = None
        self._broken: tuple[float, str] | None = None  # since when (monotonic), and how
        self._closing = False
        self._heard = dict.fromkeys(lines, time.monotonic())
        self._watcher = threading.Thread(target=self._watch, name="noria-ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Of the ranks that were started here."""
        return [process.pid for process in self._processes.values()]

    # --- start ----------------------------------------------------------------------------------------------------

    def await_ready(self, stage: Stage) -> None:
        """`stage` is this rank's own. Blocks until all others have loaded; raises RankLost, or ValueError for what
        would fail again."""
        self._stage = stage
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or len(self._ready) == len(self.lines))
        self.check()

    # --- steps ----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._out)

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def submit(self, step: StepInput) -> None:
        self._out.append(self._start(step))

    def collect(self) -> list[RowOutput]:
        return self._await(self._out.popleft())

    def run(self, step: StepInput) -> list[RowOutput]:
        return self._await(self._start(step))

    def _start(self, step: StepInput) -> int:
        """The integers go to every rank at once: each knows what will come before it comes."""
        self.check()
        self._number += 1
        number_of = self._masks.number_of if self._masks is not None else _unsent
        message = encode(Step(self._number, step), number_of)
        for rank in self.lines:
            self._send(rank, message)
        if self._masks is not None:
            self._masks.follow()
        if self._stage is not None:
            self._stage.submit(self._number, step)
        return self._number

    def _await(self, number: int) -> list[RowOutput]:
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or number in self._answers)
            answer = self._answers.pop(number, None)
        if answer is None:
            self.check()
            raise RankLost("a rank was lost")
        if answer.error is not None:
            raise StepFailed(answer.error)
        return answer.outputs

    # --- the other ranks ------------------------------------------------------------------------------------------

    def take(self, rank: int, message: FromRank) -> None:
        """What a rank reports; the stage of this one as well."""
        if isinstance(message, Answer) and message.error is not None:
            log.error("a rank could not compute a step", rank=rank, step=message.number, error=message.error)
        with self._changed:
            if isinstance(message, Answer) and rank == self._parallel.sampling_rank:
                self._answers[message.number] = message
            elif isinstance(message, Ready):
                self._ready.add(rank)
            elif isinstance(message, Broken) and self._broken is None:
                self._broken = time.monotonic(), message.message
            self._changed.notify_all()
        if isinstance(message, Failed):
            text = f"rank {rank}: {message.message}"
            self._lose(ValueError(message.message) if message.is_final else RankLost(text))

    def _send(self, rank: int, message: bytes | Masks) -> None:
        """One who is not there any more is found by the watcher."""
        try:
            if isinstance(message, bytes):
                self.lines[rank].send_encoded("step", message)
            else:
                self.lines[rank].send(message)
        except LineClosed:
            pass

    def _watch(self) -> None:
        pause = self._lease / PINGS_PER_LEASE
        rank_of = {line.connection: rank for rank, line in self.lines.items()}
        looked = ping_at = time.monotonic()
        while not self._closing and self._lost is None:
            for connection in wait(list(rank_of), min(pause, BROKEN_SECONDS) / 2):
                rank = rank_of[connection]  # type: ignore[index]
                try:
                    message = decode_from_rank(self.lines[rank].receive())
                except LineClosed:
                    self._lose(RankLost(f"{self._who(rank)} ended{self._how(rank)}"))
                    return
                self._heard[rank] = time.monotonic()
                self.take(rank, message)
            now = time.monotonic()
            if now - looked > self._lease / 2:  # it was this process that stood still: they were not asked
                self._heard = dict.fromkeys(self.lines, now)
            looked = now
            if now >= ping_at:
                ping_at = now + pause
                for line in self.lines.values():
                    with suppress(LineClosed):  # the next look finds it
                        line.offer(Ping())
            self._look(now)

    def _look(self, now: float) -> None:
        for rank, heard in self._heard.items():
            if now - heard > self._patience:
                self._lose(RankLost(f"{self._who(rank)} has said nothing for {self._patience:g} s"))
        if self._broken is not None and now - self._broken[0] > BROKEN_SECONDS:
            self._lose(RankLost(f"the data channel broke: {self._broken[1]}"))

    def _lose(self, error: Exception) -> None:
        """Without one rank the others are of no use; they end with their lines, or are ended here."""
        with self._changed:
            if self._lost is None and not self._closing:
                self._lost = error
            self._changed.notify_all()
        self._end(0.0)

    def _who(self, rank: int) -> str:
        process = self._processes.get(rank)
        return f"rank {rank}" if process is None else f"rank {rank} (process {process.pid})"

    def _how(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return ""
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" ({Signals(-code).name if code < 0 else f'exit code {code}'})"

    def close(self) -> None:
        self._closing = True
        if self._masks is not None:
            self._masks.close()
        self._end(END_SECONDS)
        if self._stage is not None:
            self._stage.close(END_SECONDS)
        self._watcher.join(END_SECONDS)

    def _end(self, seconds: float) -> None:
        for line in self.lines.values():
            line.close()
        give_up = time.monotonic() + seconds
        for process in self._processes.values():
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _unsent(mask: object) -> int:
    """Masks stay here where this rank samples; others have no use for them."""
    return 0
