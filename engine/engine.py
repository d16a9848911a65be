"""The loop: claim, select, submit, collect, complete, publish; once per iteration, for ever.

Joins scheduler, executor and broker, and keeps a fault to the request that it belongs to. Knows no HTTP, no tenants'
rights, no tensors.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from concurrent.futures import Future
from time import perf_counter
from typing import NamedTuple

import structlog

from noria.engine.adapters import Adapters
from noria.engine.execution.executor import Executor, RankLost
from noria.engine.execution.step import RowOutput, StepInput
from noria.engine.grammar.grammars import Grammars
from noria.engine.live import LiveRequest
from noria.engine.scheduling.batch import Batch, Progress
from noria.engine.scheduling.scheduler import CannotEverFit, Scheduler
from noria.engine.spans import EngineSpans
from noria.engine.statistics import Statistics
from noria.engine.trace import IterationLog, Times
from noria.engine.waiting_room import WaitingRoom
from noria.engine.wheel import Wheel
from noria.engine.wire.broker import BrokerUnavailable, EngineBroker
from noria.engine.wire.messages import (
    CLASSES,
    Claimed,
    FinishReason,
    GenerationRequest,
    ModelCard,
    TokenFrame,
    TokenLogprob,
)
from noria.kernels.compiles import Compiles

log = structlog.get_logger("noria.engine")

IDLE_WAIT = 1.0  # seconds on the bell before the lease is renewed anyway
BUFFER_SECONDS = 5.0  # how long iterations go on while the store is away and their frames pile up here
GONE_SECONDS = 10.0  # how long a gateway found gone is taken for gone: its queued requests are ended uncomputed
GRAMMAR_WAIT = 0.02  # seconds between looks at the queue while nothing runs and a grammar is being compiled
OUTAGE_PAUSE = 0.2  # seconds between attempts to reach a store that is away


class _Out(NamedTuple):
    """A plan that is being computed. Times in seconds; `submitted` on the clock of `perf_counter`."""

    batch: Batch
    exchange: float
    select: float
    submitted: float


class Engine:
    """One model behind one queue. `step` is one turn of the wheel; `run` turns it until `stop` is set."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        broker: EngineBroker,
        card: ModelCard,
        grammars: Grammars,
        trace: IterationLog | None = None,
        wheel: Wheel | None = None,
        spans: EngineSpans | None = None,
        compiles: Compiles | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._broker = broker
        self._card = card
        self._live: dict[str, LiveRequest] = {}  # by the scheduler's id, which is new at every claim
        self._held: dict[str, LiveRequest] = {}  # by the id on the wire: what this engine may still speak for
        self._waiting = WaitingRoom(grammars, capacity=scheduler.max_batch_size)
        self._adapters = adapters
        self._trace = trace
        self._wheel = wheel
        self._spans = spans
        self._num_claims = 0
        self._stop = threading.Event()
        self._batches: deque[_Out] = deque()
        self._exchange_seconds = 0.0  # of the exchange before the next iteration
        self._outbox: dict[str, list[TokenFrame]] = defaultdict(list)  # by gateway, until the store has them
        self._gone_until: dict[str, float] = {}  # by gateway, monotonic
        self._away_since: float | None = None  # monotonic time since the store stopped answering
        self.statistics = Statistics(scheduler, self._waiting, grammars.counts, compiles or Compiles(), adapters)
        self.last_turn = time.monotonic()  # heartbeat and liveness end when this grows old

    def run(self, stop: threading.Event, hurry: threading.Event | None = None, drain_seconds: float = 0.0) -> None:
        """Turn until `stop`; then claim nothing more and go on with what is here for `drain_seconds` at most, or until
        `hurry`. What is still running then is handed back by the broker's `close`. Raises RankLost."""
        self._stop = stop
        while not stop.is_set():
            self.step()
        self.statistics.draining = True
        give_up = time.monotonic() + drain_seconds
        if self._held:
            log.info("draining", requests=len(self._held), seconds=drain_seconds)
        while self._held and time.monotonic() < give_up and not (hurry and hurry.is_set()):
            self.step()
        while self._batches:
            self._collect()
        self._flush()

    @property
    def is_cut_off(self) -> bool:
        """Whether the store did not answer when it was last asked."""
        return self._away_since is not None

    @property
    def num_held(self) -> int:
        """Requests that this engine has claimed and not ended."""
        return len(self._held)

    def step(self) -> None:
        """Exchange with the queue, put batches out while the pipeline has room, fold the oldest one back.

        A full engine exchanges while it computes: nobody can join it before somebody ends.
        """
        self._executor.check()
        full = self._scheduler.is_full
        if not full:
            self._exchange()
        self._admit_ready()
        while self._may_compute() and self._executor.in_flight < self._executor.depth:
            started = perf_counter()
            batch = self._scheduler.select()
            if batch is None:
                break
            self._submit(batch, perf_counter() - started)
        if full:
            self._exchange()
        if self._batches:
            self._collect()
        self.last_turn = time.monotonic()

    # --- the queue ------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Publish what the last iteration gave and claim what the next one can take: one round trip."""
        rooms = self._scheduler.rooms(len(CLASSES))
        frames, self._outbox = self._outbox, defaultdict(list)  # the broker keeps what it could not send
        try:
            if not self._live and not frames and self._away_since is None and not self._stop.is_set():
                self._scheduler.check()
                if len(self._waiting):
                    self._waiting.wait(GRAMMAR_WAIT)
                else:
                    self._broker.wait(IDLE_WAIT)
            # Looked at after the wait: who is told to stop meanwhile claims nothing more.
            claims = self._away_since is None and not self._stop.is_set()
            started = perf_counter()
            result = self._broker.exchange(
                frames,
                self.statistics.due(),
                max_requests=[min(room.requests, self._waiting.free) for room in rooms] if claims else 0,
                max_blocks=[room.blocks for room in rooms],
            )
            self._exchange_seconds = perf_counter() - started
        except BrokerUnavailable as error:
            self._note_outage(error)
            return
        if self._away_since is not None:
            log.info("the store answers again", away_seconds=round(time.monotonic() - self._away_since, 1))
            self._away_since = None
        if result.lease_lost:
            log.warning("the lease was lost; everything held is given up", requests=len(result.fenced))
        # In this order: a fenced request may come back as a claim, and a claim may already be cancelled.
        self._drop(result.fenced)
        now = time.monotonic()
        gone = {gateway: until for gateway, until in self._gone_until.items() if until > now}
        self._gone_until = gone | dict.fromkeys(result.gone_gateways, now + GONE_SECONDS)
        for claimed in result.claimed:
            if not claimed.request.logged and claimed.request.gateway in self._gone_until:
                self._refuse(claimed, FinishReason.CANCELLED, None)
            else:
                self._take_up(claimed)
        for request_id in result.cancelled:
            self._end(request_id, FinishReason.CANCELLED)
        for request_id in self._of_gateways(result.gone_gateways):
            self._end(request_id, FinishReason.CANCELLED)
        self._end_expired()
        self._let_adapters_go()

    def _note_outage(self, error: BrokerUnavailable) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("the store is away", error=str(error))
        if not self._may_compute() or not self._live:
            time.sleep(OUTAGE_PAUSE)

    def _may_compute(self) -> bool:
        return self._away_since is None or time.monotonic() - self._away_since < BUFFER_SECONDS

    def _take_up(self, claimed: Claimed) -> None:
        """Add a claimed request to the scheduler, or end it at once with the reason why not."""
        request = claimed.request
        self._drop([request.id])  # should the store, having lost a second, give it to us twice
        self._num_claims += 1
        try:
            # An earlier claim of the same request may still be in an iteration that is out: it is another row.
            live = LiveRequest.start(claimed, self._card, f"{request.id}#{self._num_claims}")
            if self._spans is not None:
                live.spans = self._spans.of(claimed)
            adapter = self._adapter_of(request)
            if adapter is not None or request.sampling.grammar is not None:
                self._waiting.enter(live, adapter)
            else:
                self._scheduler.add(live.scheduled)
                self._live[live.scheduled.id] = live
        except CannotEverFit as error:
            self._refuse(claimed, FinishReason.ERROR, str(error))
        except Exception as error:
            log.exception("a claimed request is not valid", request=request.id)
            self._refuse(claimed, FinishReason.ERROR, f"invalid request: {error}")
        else:
            self._held[request.id] = live

    def _adapter_of(self, request: GenerationRequest) -> Future[str] | None:
        """None where there is nothing to wait for. Raises ValueError."""
        if request.adapter is None:
            return None
        if self._adapters is None:
            raise ValueError("this engine takes no adapters")
        return self._adapters.bring(request.adapter)

    def _let_adapters_go(self) -> None:
        """Those that were unloaded, once nobody here uses them any more: what is in flight included."""
        if self._adapters is not None and self._adapters.has_spare:
            refs = (live.claimed.request.adapter for live in (*self._live.values(), *self._held.values()))
            self._adapters.let_go({ref.digest for ref in refs if ref is not None})

    def _admit_ready(self) -> None:
        """Requests whose grammars and adapters are there join the others; one whose are no good ends."""
        for live, refusal in self._waiting.ready():
            request = live.claimed.request
            del self._held[request.id]
            if refusal is not None:
                end = FinishReason.OVERLOADED if refusal.busy else FinishReason.ERROR
                self._refuse(live.claimed, end, refusal.message, refusal.param)
                continue
            try:
                self._scheduler.add(live.scheduled)
            except ValueError as error:  # CannotEverFit is one
                self._refuse(live.claimed, FinishReason.ERROR, str(error))
            else:
                self._live[live.scheduled.id] = self._held[request.id] = live

    def _refuse(self, claimed: Claimed, finish: FinishReason, error: str | None, param: str | None = None) -> None:
        """End a claimed request without computing anything. `param`: the client's field that is at fault."""
        request = claimed.request
        seq = sum(len(frame.token_ids) for frame in claimed.delivered)
        frame = TokenFrame(request.id, claimed.epoch, seq, [], finish=finish, error=error, error_param=param)
        self._outbox[request.gateway].append(frame)
        self.statistics.count_end(finish)

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request from outside; one in flight ends when its iteration is folded back."""
        live = self._held.get(request_id)
        if live is not None and self._waiting.leave(live):
            del self._held[request_id]
            self._refuse(live.claimed, reason, error)
        elif live is not None:
            self._cancel(live.scheduled.id, reason, error)

    def _cancel(self, scheduler_id: str, reason: str, error: str | None = None) -> None:
        progress = self._scheduler.cancel(scheduler_id, reason)
        if progress is not None:
            self._publish(progress, None, error)

    def _of_gateways(self, gateways: list[str]) -> list[str]:
        if not gateways:
            return []
        requests = ((i, live.claimed.request) for i, live in self._held.items())
        return [i for i, request in requests if request.gateway in gateways and not request.logged]

    def _end_expired(self) -> None:
        now = time.time() * 1000
        for request_id, live in list(self._held.items()):
            deadline = live.claimed.request.deadline_ms
            if deadline is not None and deadline < now:
                self._end(request_id, FinishReason.EXPIRED)

    def _drop(self, request_ids: list[str]) -> None:
        """Forget requests that are no longer ours: no frame of ours may reach anybody."""
        for request_id in request_ids:
            live = self._held.pop(request_id, None)
            if live is not None and self._waiting.leave(live):
                continue
            # One in flight, or padding in a closed batch, stays until the scheduler lets go of it.
            if live is not None and self._scheduler.cancel(live.scheduled.id) is not None:
                del self._live[live.scheduled.id]

    def _flush(self) -> None:
        """Publish what the last iteration gave: what has ended must not be handed back."""
        if any(self._outbox.values()):
            self._exchange()

    # --- the iteration --------------------------------------------------------------------------------------------

    def _submit(self, batch: Batch, select_seconds: float) -> None:
        if self._adapters is not None and self._adapters.loaded:
            batch = self._grouped(batch)
        self._batches.append(_Out(batch, self._exchange_seconds, select_seconds, perf_counter()))
        self._exchange_seconds = 0.0  # a second plan out beside this one had none of its own
        self._executor.submit(self._step_input(batch))

    def _grouped(self, batch: Batch) -> Batch:
        """Decode rows first, as before, and among them and the others those of one adapter next to each other."""
        refs = [self._live[row.request.id].claimed.request.adapter for row in batch.rows]
        if not any(refs):
            return batch
        digests = ["" if ref is None else ref.digest for ref in refs]
        order = sorted(range(len(refs)), key=lambda place: (not batch.rows[place].is_decode, digests[place]))
        return Batch(tuple(batch.rows[place] for place in order))

    def _step_input(self, batch: Batch) -> StepInput:
        rows = [self._live[row.request.id].row(row, self._card) for row in batch.rows]
        return StepInput(rows, batch.num_decode_rows)

    def _collect(self) -> None:
        batch, exchange, select, submitted = self._batches.popleft()
        try:
            outputs = self._executor.collect()
        except RankLost:
            raise
        except Exception as error:
            log.error("an iteration failed; its requests are run one by one", error=repr(error), rows=len(batch.rows))
            self._isolate(batch)
            return
        self._fold(batch, outputs, Times(select, perf_counter() - submitted, exchange))

    def _isolate(self, batch: Batch) -> None:
        """Repeat a failed iteration row by row, so that only the request at fault ends with an error."""
        self._scheduler.abandon(batch)
        for row in batch.rows:
            request = row.request
            if request.cancelled is not None and request.finish is None:  # it was to end with this iteration
                self._cancel(request.id, request.cancelled)
                continue
            if request.finish is not None and not row.is_padding:
                continue
            single = self._scheduler.only(row)
            started = perf_counter()
            try:
                outputs = self._executor.run(self._step_input(single))
            except RankLost:
                raise
            except Exception as error:
                log.error("a request failed", request=request.id, error=repr(error), exc_info=True)
                self._scheduler.abandon(single)
                self._cancel(request.id, FinishReason.ERROR, "the model could not compute this request")
            else:
                self._fold(single, outputs, Times(0.0, perf_counter() - started))

    def _fold(self, batch: Batch, outputs: list[RowOutput], times: Times) -> None:
        """Give an iteration's results to the scheduler and its news to the outbox."""
        errors: dict[str, str] = {}
        logprobs: dict[str, list[TokenLogprob] | None] = {}
        lives = [self._live[row.request.id] for row in batch.rows]
        for live, row, output in zip(lives, batch.rows, outputs, strict=True):
            live.note_prompt(row, output)
            if output.error is not None:
                errors[row.request.id] = output.error
                self._scheduler.cancel(row.request.id, FinishReason.ERROR)
            logprobs[row.request.id] = output.logprobs
        for progress in self._scheduler.complete(batch, [output.token_ids for output in outputs]):
            request_id = progress.request.id
            self._live[request_id].note_output(progress)
            self._publish(progress, logprobs.get(request_id), errors.get(request_id))
        self.statistics.count_step(batch, times)
        if self._trace is not None:
            self._trace.record(batch, outputs, self._scheduler, times)
        if self._wheel is not None and self._wheel.watched:
            self._wheel.record(batch, lives, self._scheduler, times)

    def _publish(self, progress: Progress, logprobs: list[TokenLogprob] | None, error: str | None) -> None:
        live = self._live[progress.request.id]
        if progress.finish is not None:
            del self._live[progress.request.id]
        request_id = live.claimed.request.id
        if self._held.get(request_id) is not live:  # dropped: another engine has it, or this one by a newer claim
            return
        frame = live.frame(progress, logprobs, error)
        self._outbox[live.claimed.request.gateway].append(frame)
        if live.spans is not None:
            live.spans.published(frame)
        self.statistics.count_tokens(progress)
        if progress.finish is not None:
            del self._held[request_id]
            self.statistics.count_end(FinishReason(progress.finish))
