"""The iteration log: who stepped in which lane of the batch, with how many tokens, and what the iteration took.

JSON lines, written by a thread of their own: an iteration pays for handing a record over. Knows no tensors, no text
and no queue.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import BinaryIO, Literal

import msgspec
import structlog

from noria.engine.execution.step import RowOutput
from noria.engine.lanes import Lanes
from noria.engine.scheduling.batch import Batch, BatchRow
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler

log = structlog.get_logger("noria.engine")

MAX_BEHIND = 10_000  # records: a disk this slow ends the log, not the engine
MAX_ENGINES = 64  # that share one name: FILE, FILE-2, FILE-3, ...


class TraceStart(msgspec.Struct, frozen=True, tag="start"):
    """First line of a run; a file that several runs were appended to has several."""

    model: str
    policy: str
    max_batch_size: int
    max_batch_tokens: int
    max_chunk_tokens: int
    num_blocks: int
    block_size: int
    started: float  # Unix seconds


class TraceRequest(msgspec.Struct, frozen=True, tag="request"):
    """Comes before the first iteration that has a row of this request; rows name it by `number`."""

    number: int
    id: str
    num_prompt: int
    max_tokens: int
    num_cached: int  # prompt tokens found in the prefix cache


class TraceRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's part in an iteration: `[lane, request, phase, tokens, sampled, context]`."""

    lane: int  # kept from the first step until the request ends or is preempted
    request: int
    phase: Literal["p", "d", "-"]  # prefill, decode, padding
    num_tokens: int
    num_sampled: int
    context: int  # tokens that the last of them attends to, itself included


class TraceIteration(msgspec.Struct, frozen=True, tag="iteration"):
    """One iteration. `waiting`, `running` and blocks are counted after its results are folded back."""

    at: float  # seconds since the log was opened, when the results were folded back
    rows: list[TraceRow]
    num_tokens: int
    blocks_used: int
    blocks_free: int
    waiting: int
    running: int
    select_us: int
    forward_us: int  # from the control message made to the results read
    exchange_us: int  # with the queue, before this iteration; waiting for work is not in it
    ended: list[tuple[int, str]]  # request, why: between the iteration before and the end of this one
    preempted: list[int]


TraceLine = TraceStart | TraceRequest | TraceIteration


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that an iteration took, by part."""

    select: float
    forward: float
    exchange: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(self.select + other.select, self.forward + other.forward, self.exchange + other.exchange)


@dataclass(frozen=True, slots=True)
class _Record:
    """What the loop hands over; everything that may change until it is written is copied."""

    at: float
    rows: tuple[BatchRow, ...]
    outputs: Sequence[RowOutput]
    left: list[tuple[Request, str | None]]  # who is no longer admitted, and why it ended; None: preempted
    blocks: tuple[int, int]  # used, free
    waiting: int
    running: int
    times: Times


class IterationLog:
    """Writes to `path`, or to `path` with a number where another engine holds it. Raises ValueError if it cannot."""

    def __init__(self, path: Path, start: TraceStart) -> None:
        self._file, self.path = _open(path)
        self._opened = perf_counter()
        self._running: tuple[Request, ...] = ()
        self._waiting: tuple[Request, ...] = ()
        self._queue: SimpleQueue[_Record | None] = SimpleQueue()
        self._broken = False
        self._writer = threading.Thread(target=self._write, args=(start,), name="noria-trace", daemon=True)
        self._writer.start()

    def record(self, batch: Batch, outputs: Sequence[RowOutput], scheduler: Scheduler, times: Times) -> None:
        """Note an iteration whose results the scheduler has just folded back."""
        if self._broken:
            return
        running, waiting = tuple(scheduler.running), tuple(scheduler.waiting)
        left: list[tuple[Request, str | None]] = []
        # One that came and went within this iteration has read its prompt in it.
        if running != self._running or waiting != self._waiting or not all(row.is_decode for row in batch.rows):
            stepped = {*self._running, *(row.request for row in batch.rows)}
            left += [(r, r.finish) for r in stepped.difference(running)]
            # And one that was preempted may end without stepping again.
            left += [(r, r.finish) for r in set(self._waiting) - stepped if r.finish is not None]
            self._running, self._waiting = running, waiting
        self._queue.put(
            _Record(
                perf_counter() - self._opened,
                batch.rows,
                outputs,
                left,
                (scheduler.kv.num_held, scheduler.kv.num_free),
                len(waiting),
                len(running),
                times,
            )
        )

    def close(self) -> None:
        """Write what was handed over."""
        self._queue.put(None)
        self._writer.join()

    def _write(self, start: TraceStart) -> None:
        lines = _Lines()
        try:
            with self._file as file:
                file.write(_line(start))
                while (record := self._queue.get()) is not None:
                    file.writelines(map(_line, lines.of(record)))
                    if self._queue.empty():
                        file.flush()
                    elif self._queue.qsize() > MAX_BEHIND:
                        raise OSError("the disk is too slow")
        except OSError as error:
            self._broken = True
            log.warning("the iteration log ends here", file=str(self.path), error=str(error))


class _Lines:
    """Gives requests their numbers and lanes."""

    def __init__(self) -> None:
        self._numbers: dict[Request, int] = {}
        self._lanes = Lanes()
        self._count = 0

    def of(self, record: _Record) -> list[TraceLine]:
        lines: list[TraceLine] = [
            self._introduce(row.request, row) for row in record.rows if row.request not in self._numbers
        ]
        rows = [self._row(row, len(output.token_ids)) for row, output in zip(record.rows, record.outputs, strict=True)]
        ended: list[tuple[int, str]] = []
        preempted: list[int] = []
        for request, finish in record.left:
            number = self._numbers.get(request)
            if number is None:  # ended before its first step
                continue
            self._lanes.leave(request)
            if finish is None:
                preempted.append(number)
            else:
                ended.append((number, finish))
                del self._numbers[request]
        lines.append(_iteration(record, rows, sorted(ended), sorted(preempted)))
        return lines

    def _introduce(self, request: Request, row: BatchRow) -> TraceRequest:
        self._numbers[request] = self._count
        self._count += 1
        return TraceRequest(
            self._numbers[request],
            request.id,
            request.num_prompt,
            request.max_tokens,
            min(row.start, request.num_prompt),
        )

    def _row(self, row: BatchRow, num_sampled: int) -> TraceRow:
        request = row.request
        context = row.start + row.num_tokens
        lane, number = self._lanes.of(request), self._numbers[request]
        return TraceRow(lane, number, row.phase, row.num_tokens, num_sampled, context)


def _iteration(
    record: _Record, rows: list[TraceRow], ended: list[tuple[int, str]], preempted: list[int]
) -> TraceIteration:
    used, free = record.blocks
    return TraceIteration(
        at=round(record.at, 6),
        rows=rows,
        num_tokens=sum(row.num_tokens for row in rows),
        blocks_used=used,
        blocks_free=free,
        waiting=record.waiting,
        running=record.running,
        select_us=round(1e6 * record.times.select),
        forward_us=round(1e6 * record.times.forward),
        exchange_us=round(1e6 * record.times.exchange),
        ended=ended,
        preempted=preempted,
    )


def _line(record: TraceLine) -> bytes:
    return _encoder.encode(record) + b"\n"


_encoder = msgspec.json.Encoder()
decode_line = msgspec.json.Decoder(TraceLine).decode


def _open(path: Path) -> tuple[BinaryIO, Path]:
    """The file, for us alone until we close it or die: engines that were told the same name number theirs."""
    try:
        for number in range(1, MAX_ENGINES + 1):
            own = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
            file = own.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                return file, own
    except OSError as error:
        raise ValueError(f"--trace-iterations {path}: {(error.strerror or str(error)).lower()}") from None
    raise ValueError(f"--trace-iterations {path}: {MAX_ENGINES} engines write there already")
