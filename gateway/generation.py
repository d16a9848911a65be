"""The only generation path: submit, frames, text, typed deltas, exactly one end. For every endpoint, streaming or not.

Ignorant of HTTP framing and of the endpoints' shapes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from noria.engine.wire.broker import BrokerUnavailable, GatewayBroker, QueueFull
from noria.engine.wire.messages import GenerationRequest, TokenFrame, Usage
from noria.gateway.choice import ChoiceReader, Delta, TextOptions
from noria.gateway.errors import STORE_AWAY, DeadlineExpired, EngineFault, GatewayError, Overloaded
from noria.gateway.metrics import GatewayMetrics
from noria.gateway.model_directory import ServedModel
from noria.gateway.pump import FramePump

_QUEUE_FULL = "The queue of this model is full. Please try again."


class Generation:
    """All choices of one HTTP request: `requests` are its prompts times n, prompt-major, in the order of the choices.

    Use as `async with`: entering puts every request on the queue or none of them, leaving for whatever reason
    (end, error, the client hung up) cancels what still runs. `deltas()` may be read once.

        async with Generation(...) as generation:
            async for deltas in generation.deltas(): ...
        generation.usage()
    """

    def __init__(
        self,
        broker: GatewayBroker,
        pump: FramePump,
        metrics: GatewayMetrics,
        model: ServedModel,
        requests: Sequence[GenerationRequest],
        options: TextOptions,
        *,
        n: int,
        timeout: float,
        max_backlog: int,
    ) -> None:
        self._broker = broker
        self._pump = pump
        self._metrics = metrics
        self._model = model
        self._requests = {request.id: request for request in requests}
        readers = (ChoiceReader(index, model.tokenizer, options) for index in range(len(requests)))
        self._readers = dict(zip(self._requests, readers, strict=True))
        self._n = n
        self._timeout = timeout
        self._max_backlog = max_backlog
        self._inbox: list[TokenFrame] = []
        self._backlog = 0  # tokens in the inbox
        self._fault: GatewayError | None = None
        self.failed = asyncio.Event()  # ended from outside: too late, or too slow a reader
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._started = self._heard = time.monotonic()

    @property
    def num_choices(self) -> int:
        return len(self._readers)

    async def __aenter__(self) -> Generation:
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self._expire)
        self._pump.register(self._requests, self)
        try:
            for request in self._requests.values():
                await self._broker.enqueue(request, self._model.card)
        except QueueFull as error:
            self.close()
            raise Overloaded(_QUEUE_FULL, retry_after=error.retry_after) from error
        except BrokerUnavailable as error:
            self.close()
            raise Overloaded(STORE_AWAY, retry_after=2) from error
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, one delta per choice at most; whatever arrives while the reader is busy comes as one.

        Raises a `GatewayError` as soon as one choice fails: then the others are cancelled too.
        """
        live = len(self._readers)
        while live:
            if not self._inbox and self._fault is None:
                await self._wait()
            if self._fault is not None:
                raise self._fault
            new = self._read(self._take())
            live -= sum(delta.finish is not None for delta in new)
            if new:
                yield new

    def accept(self, frame: TokenFrame) -> None:
        """Called by the pump."""
        self._heard = time.monotonic()
        self._inbox.append(frame)
        self._backlog += len(frame.token_ids)
        if self._backlog > self._max_backlog:
            self._fail(EngineFault("The client reads its answer too slowly.", code="slow_client"))
        self._wake()

    async def resend_if_silent(self, seconds: float) -> None:
        """Offer the requests to the store again if nothing was heard for so long: a store that lost its last second
        in a crash may have forgotten them. Where they survived, this changes nothing."""
        if time.monotonic() - self._heard < seconds:
            return
        self._heard = time.monotonic()
        for request_id, reader in self._readers.items():
            if not reader.ended:
                reader.restart_epoch()
                await self._broker.enqueue(self._requests[request_id], self._model.card)

    def usage(self) -> Usage:
        """Tokens of all choices: a prompt counts once however many choices it has, output is what was consumed."""
        prompts = list(self._requests.values())[:: self._n]
        return Usage(
            prompt_tokens=sum(len(request.prompt) for request in prompts),
            completion_tokens=sum(reader.num_tokens for reader in self._readers.values()),
            cached_tokens=sum(reader.cached_tokens for reader in list(self._readers.values())[:: self._n]),
        )

    def close(self) -> None:
        """Let go of everything; what has not ended is cancelled in the background."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._pump.unregister(self._requests)
        self._inbox.clear()
        self._count_tokens()
        for request_id, reader in self._readers.items():
            if not reader.ended:
                self._pump.cancel(self._model.card.id, request_id)

    def _count_tokens(self) -> None:
        usage, model_id = self.usage(), self._model.card.id
        self._metrics.prompt_tokens.labels(model_id).inc(usage.prompt_tokens)
        self._metrics.completion_tokens.labels(model_id).inc(usage.completion_tokens)

    def _take(self) -> list[TokenFrame]:
        frames, self._inbox, self._backlog = self._inbox, [], 0
        return frames

    def _read(self, frames: list[TokenFrame]) -> list[Delta]:
        merged: dict[str, Delta] = {}
        for frame in frames:
            reader = self._readers[frame.request_id]
            before = reader.num_tokens
            delta = reader.accept(frame)
            if before == 0 and reader.num_tokens:
                self._metrics.first_token.observe(time.monotonic() - self._started)
            if reader.stopped_by_text and delta.finish:
                self._pump.cancel(self._model.card.id, frame.request_id)
            if not delta:
                continue
            if delta.finish and reader.num_tokens:
                self._metrics.token_latency.observe((time.monotonic() - self._started) / reader.num_tokens)
            if (earlier := merged.get(frame.request_id)) is not None:
                earlier.extend(delta)
            else:
                merged[frame.request_id] = delta
        return list(merged.values())

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: GatewayError) -> None:
        """End from outside: whoever reads gets the error, and the engine is freed even if nobody ever reads."""
        self._fault = self._fault or error
        self.failed.set()
        self._wake()
        self.close()

    def _expire(self) -> None:
        self._fail(DeadlineExpired(f"The request was not done within {self._timeout:g} seconds."))
