"""The only generation path: submit, frames, text, typed deltas, exactly one end. For every endpoint, streaming or not.

Ignorant of HTTP framing, of the endpoints' shapes, and of where frames come from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

import structlog

from noria.engine.wire.broker import StoreFault
from noria.engine.wire.messages import TokenFrame, Usage
from noria.gateway.choice import ChoiceReader, Delta, TextOptions
from noria.gateway.errors import SHUTTING_DOWN, UNEXPECTED, DeadlineExpired, EngineFault, GatewayError, ShuttingDown
from noria.gateway.linger import Lingering
from noria.gateway.metrics import GatewayMetrics
from noria.gateway.model_directory import ServedModel
from noria.gateway.origin import Origin
from noria.gateway.tickets import Ticket
from noria.gateway.tracing import TRACE
from noria.gateway.transcript import Transcript, one_by_one

log = structlog.get_logger(__name__)


class Generation:
    """All choices of one HTTP request: `request_ids` are its prompts times n, prompt-major, in the order of the
    choices; `prompt_tokens` are per prompt.

    Use as `async with`: entering puts every request on the queue or none of them, leaving for whatever reason (end,
    error, the client hung up) cancels what still runs. With a ticket the answer is others' to ask for as well: then a
    client that leaves early leaves it to `Lingering`.

        async with Generation(...) as generation:
            async for deltas in generation.deltas(): ...
        generation.usage()

    A stream takes deltas as they come: it sets `listener`, which is called when there is something to `take`, until
    `over`.
    """

    def __init__(
        self,
        origin: Origin,
        lingering: Lingering,
        metrics: GatewayMetrics,
        model: ServedModel,
        request_ids: Sequence[str],
        prompt_tokens: Sequence[int],
        options: TextOptions,
        *,
        ticket: Ticket | None,
        timeout: float,
        max_backlog: int,
    ) -> None:
        self._origin = origin
        self._lingering = lingering
        self._metrics = metrics
        self._model_id, self._pool = model.card.id, model.card.pool
        self._trace = TRACE.get()
        self._readers = {
            request_id: ChoiceReader(index, model.tokenizer, options, request_id)
            for index, request_id in enumerate(request_ids)
        }
        self._prompt_tokens = prompt_tokens
        self.ticket = ticket
        self._transcripts = {i: Transcript(i) for i in request_ids} if ticket is not None else None
        # One delta for each token where a stream is read more than once, and where it matters which text a score is of.
        self._singly = ticket is not None or (options.logprobs and options.parser is not None)
        self._timeout = timeout
        self._max_backlog = max_backlog
        self._inbox: list[TokenFrame] = []
        self._backlog = 0  # tokens in the inbox
        self._live = len(request_ids)
        self._fault: GatewayError | None = None
        self._detached = False  # the fault is the client's or the gateway's: the requests may go on
        self._settled = False
        self.failed = asyncio.Event()  # ended from outside: too late, or too slow a reader
        self.listener: Callable[[], None] | None = None
        self._end_presence: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._started = self._heard = time.monotonic()
        self._first_at: dict[str, float] = {}  # by request: when its first token came, monotonic
        self.heard = False  # a frame has come: it waits no more

    @property
    def num_choices(self) -> int:
        return len(self._readers)

    @property
    def first_request(self) -> tuple[str, str]:
        """Pool and id of the request with the first choice: its place in the queue is the client's."""
        return self._pool, next(iter(self._readers))

    @property
    def over(self) -> bool:
        """Every choice has ended well, and every delta was taken."""
        return self._live == 0

    async def __aenter__(self) -> Generation:
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self._expire)
        try:
            await self._origin.open(self, self._lose)
        except BaseException:
            self._let_go()
            raise
        if self.ticket is not None and self.ticket.following:
            self._end_presence = self._lingering.present(self.ticket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.listener = None
        if self._end_presence is not None:
            self._end_presence()
        left_early = not self.over and (self._fault is None or self._detached) and self._timer is not None
        if left_early and self.ticket is not None and not self.ticket.following:
            self._fault, self._detached = None, False
            self._lingering.adopt(self, self.ticket)
        else:
            self.close()

    async def begun(self) -> None:
        """Wait for the first word of an engine on any choice; until then it may find fault with the request itself.
        Raises a `GatewayError` where it does, or where the generation ends before."""
        while not self._inbox and self._fault is None:
            await self._wait()
        if self._fault is not None:
            raise self._fault
        if any(frame.error_param is not None for frame in self._inbox):
            self.take()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, one delta per choice at most; whatever arrives while the reader is busy comes as one.

        Raises a `GatewayError` as soon as one choice fails: then the others are cancelled too.
        """
        while not self.over:
            new = self.take()
            if new:
                yield new
            elif not self.over:
                await self._wait()

    def take(self) -> list[Delta]:
        """What has come since the last time, without waiting: one delta per choice at most, or one for every token, so
        that a stream is the same whenever it is read. Raises as `deltas`."""
        if self._fault is not None:
            raise self._fault
        frames, self._inbox, self._backlog = self._inbox, [], 0
        if not frames:
            return []
        try:
            return self._read_singly(frames) if self._singly else self._read(frames)
        except GatewayError as error:
            self._fault = error
            self._settle()
            raise

    def accept(self, frame: TokenFrame) -> None:
        self._inbox.append(frame)
        self._backlog += len(frame.token_ids)
        if self._backlog > self._max_backlog:
            self._fail(EngineFault("The client reads its answer too slowly.", code="slow_client"), detach=True)

    def flush(self) -> None:
        self._heard, self.heard = time.monotonic(), True
        if self.listener is not None:
            self.listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def resend_if_silent(self, seconds: float) -> None:
        """Offer the requests to the store again if nothing was heard for so long: a store that lost its last second
        in a crash may have forgotten them. Where they survived, this changes nothing."""
        if time.monotonic() - self._heard < seconds:
            return
        self._heard = time.monotonic()
        for request_id, reader in self._readers.items():
            if not reader.ended:
                reader.restart_epoch()
                try:
                    await self._origin.offer(request_id)
                except StoreFault:
                    log.exception("a request could not be offered again")
                    return self._fail(UNEXPECTED)

    def usage(self) -> Usage:
        """Tokens of all choices: a prompt counts once however many choices it has, output is what was consumed."""
        readers = list(self._readers.values())
        n = len(readers) // len(self._prompt_tokens)
        return Usage(
            prompt_tokens=sum(self._prompt_tokens),
            completion_tokens=sum(reader.num_tokens for reader in readers),
            cached_tokens=sum(reader.cached_tokens for reader in readers[::n]),
            reasoning_tokens=sum(reader.reasoning_tokens for reader in readers),
            accepted_prediction_tokens=sum(reader.predicted_right for reader in readers),
            rejected_prediction_tokens=sum(reader.predicted_wrong for reader in readers),
        )

    def cut_off(self) -> None:
        """The gateway ends. What has a ticket goes on without this gateway; the rest is cancelled."""
        self._fail(ShuttingDown(SHUTTING_DOWN), detach=True)

    def leave(self) -> None:
        """Read no more, cancel nothing."""
        if self._let_go():
            self._origin.leave()

    def close(self) -> None:
        """Let go of everything; what has not ended is cancelled in the background. Who only follows cancels nothing."""
        if self.ticket is not None and self.ticket.following:
            return self.leave()
        if not self._let_go():
            return
        self._origin.leave()
        self._origin.cancel({i: reader.num_tokens for i, reader in self._readers.items() if not reader.ended})
        if self.ticket is not None and not self.over:
            self._lingering.lose(self.ticket, self._fault)

    def _let_go(self) -> bool:
        if self._timer is None:
            return False
        self._timer.cancel()
        self._timer = None
        self._inbox.clear()
        usage = self.usage()
        self._metrics.prompt_tokens.labels(self._model_id).inc(usage.prompt_tokens)
        self._metrics.completion_tokens.labels(self._model_id).inc(usage.completion_tokens)
        if self._trace is not None:
            self._trace.used(self._model_id, usage)
        return True

    def _settle(self) -> None:
        """The end of an answer that others may ask for: kept if it is one, else forgotten."""
        if self.ticket is None or self._settled or self._transcripts is None:
            return
        self._settled = True
        if self._fault is not None:
            self._lingering.lose(self.ticket, self._fault)
        else:
            self._lingering.keep(self.ticket, [transcript.frame() for transcript in self._transcripts.values()])

    def _read(self, frames: list[TokenFrame]) -> list[Delta]:
        if len(frames) == 1:
            delta = self._read_one(frames[0])
            return [delta] if delta else []
        merged: dict[str, Delta] = {}
        for frame in frames:
            delta = self._read_one(frame)
            if not delta:
                continue
            if (earlier := merged.get(frame.request_id)) is not None:
                earlier.extend(delta)
            else:
                merged[frame.request_id] = delta
        return list(merged.values())

    def _read_singly(self, frames: list[TokenFrame]) -> list[Delta]:
        new = []
        for frame in frames:
            for piece in one_by_one(frame):
                if self._transcripts is not None and not self._readers[piece.request_id].ended:
                    self._transcripts[piece.request_id].add(piece)
                if delta := self._read_one(piece):
                    new.append(delta)
        if self.over:
            self._settle()
        return new

    def _read_one(self, frame: TokenFrame) -> Delta:
        reader = self._readers[frame.request_id]
        before = reader.num_tokens
        delta = reader.accept(frame)
        if before == 0 and reader.num_tokens:
            self._first_at[frame.request_id] = time.monotonic()
            self._metrics.count_first_token(self._model_id, time.monotonic() - self._started)
            if self._trace is not None:
                self._trace.first_token()
        if delta.finish:
            self._live -= 1
            if reader.stopped_by_text:
                self._origin.cancel({frame.request_id: reader.num_tokens}, why="stop")
            self._count_end(frame.request_id, delta.finish, reader.num_tokens)
        return delta

    def _count_end(self, request_id: str, finish: str, num_tokens: int) -> None:
        now = time.monotonic()
        since_first = now - self._first_at.pop(request_id, now)
        if self._trace is not None:
            self._trace.finished(finish)
        self._metrics.count_end(self._model_id, finish, now - self._started, since_first, num_tokens)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _fail(self, error: GatewayError, *, detach: bool = False) -> None:
        """End from outside: whoever reads gets the error, and the engine is freed even if nobody ever reads. Not with
        a ticket, if `detach`: then the fault is this connection's alone."""
        if self._fault is None:
            self._fault, self._detached = error, detach
        self.failed.set()
        if not (detach and self.ticket is not None):
            self.close()
        self.flush()

    def _lose(self, error: GatewayError) -> None:
        """The origin has no more frames to give: this connection's fault, not the requests'."""
        self._fail(error, detach=True)

    def _expire(self) -> None:
        self._fail(DeadlineExpired(f"The request was not done within {self._timeout:g} seconds."))
