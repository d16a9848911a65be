"""The engine process: load the model, take a place at the queue, turn the loop until told to stop.

Everything that can go wrong at the start ends here in one clear line and an exit code. Knows no HTTP.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from types import FrameType

import structlog
import torch

from noria.engine import worker
from noria.engine.adapters import AdapterWatch
from noria.engine.assembly import Assembly, assemble, open_trace
from noria.engine.config import EngineConfig, Rendezvous
from noria.engine.engine import Engine
from noria.engine.execution.executor import RankLost
from noria.engine.memory import MemoryTooSmall, show_size
from noria.engine.models.errors import ModelError
from noria.engine.plan import Plan, plan
from noria.engine.spans import EngineSpans
from noria.engine.status import StatusPages
from noria.engine.trace import IterationLog
from noria.engine.wheel import Wheel
from noria.engine.wire import logs
from noria.engine.wire.adapters import EngineAdapterList
from noria.engine.wire.broker import BrokerUnavailable, EngineBroker
from noria.engine.wire.tracing import Tracer, open_tracer
from noria.engine.wire.wheel import WheelChannel, WheelNews

log = structlog.get_logger("noria.engine")

EXIT_OK = 0
EXIT_TEMPORARY = 1  # may be better at the next try: the store is away, a fault of ours
EXIT_CONFIGURATION = 2  # will not get better by itself: model, memory, options

HEARTBEATS_PER_LEASE = 4
HEARTBEAT_END = 6.0  # seconds; a renewal takes five at most
STORE_RETRY = 0.5  # seconds between attempts to find the store at the start


def run(config: EngineConfig) -> int:
    """Serve `config.model` until SIGTERM or SIGINT; returns the exit code. The first signal drains, a second one hands
    back at once."""
    given = Rendezvous()
    if config.tp * config.pp > 1 and given.is_given and given.rank:
        return worker.run(config, given)
    logs.configure("engine", config.log_format, config.log_level)
    stop, hurry = threading.Event(), threading.Event()

    def on_signal(_: int, __: FrameType | None) -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        pages = _open_pages(config)
    except OSError as error:
        return _fail(f"cannot listen on {config.status_host}:{config.status_port}: {error.strerror}", EXIT_TEMPORARY)
    try:
        return _run(config, pages, stop, hurry)
    finally:
        if pages is not None:
            pages.close()


def _run(config: EngineConfig, pages: StatusPages | None, stop: threading.Event, hurry: threading.Event) -> int:
    try:
        # What is wrong with the configuration shows here; whatever is raised later is a fault of ours, and its
        # traceback is wanted.
        planned = plan(config)
        broker = EngineBroker(config.redis_url, planned.name, lease_seconds=config.lease_seconds)
        _find_store(broker, config.store_wait, stop)  # before the long load: an unreachable store is told at once
        if stop.is_set():
            broker.close()
            return EXIT_OK
        _refuse_taken(planned, broker.engine_id)
        trace = open_trace(planned)
        tracer = open_tracer("engine", config.traces, broker.engine_id)
        assembly = assemble(planned, _Progress(planned.name, config.progress_fd), broker.announce)
    except (ModelError, MemoryTooSmall, ValueError) as error:
        return _fail(str(error), EXIT_CONFIGURATION)
    except (BrokerUnavailable, RankLost) as error:
        return _fail(str(error), EXIT_TEMPORARY)
    try:
        return _serve(planned, broker, assembly, trace, tracer, pages, stop, hurry)
    except (BrokerUnavailable, RankLost) as error:
        return _fail(str(error), EXIT_TEMPORARY)
    finally:
        if tracer is not None:
            tracer.close()


def _fail(message: str, code: int) -> int:
    print(f"noria engine: {message}", file=sys.stderr, flush=True)
    return code


def _serve(
    planned: Plan,
    broker: EngineBroker,
    assembly: Assembly,
    trace: IterationLog | None,
    tracer: Tracer | None,
    pages: StatusPages | None,
    stop: threading.Event,
    hurry: threading.Event,
) -> int:
    config = planned.config
    if stop.is_set():  # told to stop while it loaded
        assembly.close()
        broker.close()
        return EXIT_OK
    wheel = _wheel(planned, broker.engine_id)
    spans = None if tracer is None else EngineSpans(tracer, assembly.card.id, broker.engine_id)
    engine = Engine(
        assembly.scheduler,
        assembly.executor,
        broker,
        assembly.card,
        assembly.grammars,
        trace,
        wheel,
        spans,
        planned.ops.compiles,
        assembly.adapters,
    )
    watch = _watch(planned, assembly, broker.engine_id)
    broker.register(assembly.card, assembly.tokenizer_files)
    if pages is not None:
        pages.watch(engine, assembly.card.id, broker.engine_id)
    log.info(
        "serving",
        model=assembly.card.id,
        policy=assembly.card.policy,
        max_batch_size=config.max_batch_size,
        max_model_len=assembly.card.max_model_len,
        kv_tokens=assembly.card.kv_tokens,
        kv_memory=show_size(planned.kv_bytes),
        threads=torch.get_num_threads(),
    )
    ended = threading.Event()  # later than `stop`: a draining engine keeps its lease
    heartbeat = threading.Thread(target=_beat, args=(engine, broker, config, ended), daemon=True)
    heartbeat.start()
    died = False
    try:
        engine.run(stop, hurry, config.drain_timeout)
    except RankLost:
        died = True
        raise
    finally:
        ended.set()
        heartbeat.join(HEARTBEAT_END)  # a thread that is alive when the interpreter ends can bring it down
        broker.close(died=died)
        if watch is not None:
            watch.close()
        assembly.close()
        wheel.close()
        if trace is not None:
            trace.close()
    log.info("stopped", handed_back=engine.num_held)
    return EXIT_OK


def _open_pages(config: EngineConfig) -> StatusPages | None:
    if not config.status_port:
        return None
    return StatusPages(config.status_host, config.status_port, config.stuck_after, vllm_names=config.vllm_metrics)


def _find_store(broker: EngineBroker, seconds: float, stop: threading.Event) -> None:
    """Wait until the store answers, `seconds` at most. Raises BrokerUnavailable."""
    give_up = time.monotonic() + seconds
    told = False
    while not stop.is_set():
        try:
            broker.ping()
            return
        except BrokerUnavailable as error:
            if time.monotonic() >= give_up:
                raise
            if not told:
                log.warning("waiting for the store", error=str(error), seconds=seconds)
            told = True
        stop.wait(STORE_RETRY)


def _watch(planned: Plan, assembly: Assembly, engine_id: str) -> AdapterWatch | None:
    """At work. Raises BrokerUnavailable."""
    if assembly.adapters is None:
        return None
    pool = EngineAdapterList(planned.config.redis_url, planned.name, engine_id)
    watch = AdapterWatch(assembly.adapters, pool)
    watch.start()
    return watch


def _refuse_taken(planned: Plan, engine_id: str) -> None:
    """Raises ValueError for an adapter that would be called as another model is."""
    if planned.config.adapters:
        pool = EngineAdapterList(planned.config.redis_url, planned.name, engine_id)
        taken = pool.taken(planned.config.adapters)
        pool.close()
        if taken:
            raise ValueError(f"--lora {taken[0]}: another model is served by this name")


def _wheel(planned: Plan, engine_id: str) -> Wheel:
    config = planned.config
    bare = WheelNews(
        model=planned.name,
        engine=engine_id,
        policy=config.policy,
        max_batch_size=config.max_batch_size,
        num_blocks=planned.num_blocks,
        block_size=config.block_size,
        at=0.0,
        requests=[],
        iterations=[],
    )
    return Wheel(WheelChannel(config.redis_url, planned.name), bare)


def _beat(engine: Engine, broker: EngineBroker, config: EngineConfig, ended: threading.Event) -> None:
    """Keep the lease while iterations are long; a loop that is stuck must lose it until it turns again."""
    told = False
    while not ended.wait(config.lease_seconds / HEARTBEATS_PER_LEASE):
        stuck = time.monotonic() - engine.last_turn > config.stuck_after
        if stuck and not told:
            log.error("the loop is stuck; the lease is not renewed")
        told = stuck
        if stuck:
            continue
        try:
            broker.renew()
        except BrokerUnavailable:
            continue  # the loop tells of it


class _Progress:
    """Tells how far loading is: JSON lines on a descriptor if one is given, else a log line a second."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._last = 0.0
        self._pipe = os.fdopen(descriptor, "w", buffering=1) if descriptor >= 0 else None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._last < (0.1 if self._pipe else 1.0):
            return
        self._last = now
        if self._pipe is None:
            log.info("loading", model=self._name, done=show_size(done), total=show_size(total))
            return
        try:
            self._pipe.write(json.dumps({"done": done, "total": total}) + "\n")
        except OSError:
            self._pipe = None  # nobody reads: the load matters more than its picture
