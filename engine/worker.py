"""The process of a rank that is not the first: loads its part of the model, computes what it is told, and ends with
rank 0.

Knows no queue, no scheduler and no other rank but by the two channels.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from io import RawIOBase

import structlog

from noria.engine.config import EngineConfig, Rendezvous
from noria.engine.execution.control import (
    Answer,
    Broken,
    Failed,
    Hello,
    LineClosed,
    Masks,
    Ping,
    Pong,
    Ready,
    Start,
    Step,
    ToRank,
    decoder_at_rank,
)
from noria.engine.execution.data_channel import ChannelBroken, DataChannel
from noria.engine.execution.masks import IncomingMasks
from noria.engine.execution.rendezvous import Joined, join, place
from noria.engine.execution.stage import Stage
from noria.engine.loading import load_part, new_stage
from noria.engine.memory import MemoryTooSmall
from noria.engine.models.errors import ModelError
from noria.engine.plan import Plan, plan
from noria.engine.wire import logs

log = structlog.get_logger("noria.engine")


def run(config: EngineConfig, given: Rendezvous) -> int:
    """Until rank 0 ends or closes the line; returns the exit code. Signals to stop are rank 0's affair: it has
    requests to finish, for which it needs this rank. A normal end is the process's."""
    logs.configure("engine", config.log_format, config.log_level)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        joined = join(given)
        try:
            planned = plan(config, given)
        except (ModelError, MemoryTooSmall, ValueError) as error:
            joined.line.send(Failed(str(error), is_final=True))
            return 2
        joined.line.send(Hello(given.rank, planned.num_blocks, place()))
        Rank(planned, joined).serve()
        os._exit(0)  # threads may be waiting for ranks that are gone
    except LineClosed as error:
        log.error("rank 0 is gone", rank=given.rank, reason=str(error))
        return 1
    return 0


class Rank:
    """Reads the control channel on the main thread, so that it answers whatever else goes on; loads and computes on
    others."""

    def __init__(self, planned: Plan, joined: Joined) -> None:
        self._planned = planned
        self._joined = joined
        self._line = joined.line
        self._stage: Stage | None = None
        self._masks = IncomingMasks()

    def serve(self) -> None:
        """Until the line is closed."""
        decode = decoder_at_rank(self._masks.mask)
        try:
            while True:
                self._take(decode(self._line.receive()))
        except LineClosed:
            return

    def _take(self, message: ToRank) -> None:
        match message:
            case Ping():
                self._line.send(Pong())
            case Step():
                assert self._stage is not None  # none comes before all are ready
                self._stage.submit(message.number, message.step)
            case Masks():
                self._masks.put(message.masks)
            case Start():
                threading.Thread(target=self._load, args=(message.num_blocks,), daemon=True).start()

    def _load(self, num_blocks: int) -> None:
        planned = self._planned.with_blocks(num_blocks)
        config = planned.config
        try:
            channel = DataChannel(
                planned.parallel, self._joined.store, planned.ops.device, self._joined.host, config.stuck_after
            )
            self._stage = new_stage(planned, load_part(planned, channel), channel, self._report)
        except ChannelBroken as error:
            self._report(Broken(str(error)))
        except ModelError as error:
            self._report(Failed(str(error), is_final=True))
        except Exception as error:
            log.exception("a rank could not load its part", rank=planned.parallel.rank)
            self._report(Failed(f"{type(error).__name__}: {error}"))
        else:
            self._report(Ready())

    def _report(self, message: Answer | Broken | Failed | Ready) -> None:
        with suppress(LineClosed):  # the other thread finds out
            self._line.send(message)


def main() -> int:
    """A rank started by rank 0, which writes the settings to its standard input, and whose end closes it."""
    with open(0, "rb", buffering=0) as pipe:
        told = json.loads(pipe.readline())
        threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
        return run(EngineConfig(**told["config"]), Rendezvous(**told["rendezvous"]))


def _end_with(pipe: RawIOBase) -> None:
    """Whatever this process is at, be it looking for a rank 0 that is gone."""
    pipe.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
