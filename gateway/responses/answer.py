"""The shape of a response, streamed or whole: the response object around the items that an answer grows.

Knows the events' order; asks others to keep what has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from noria.engine.wire.broker import BrokerUnavailable
from noria.engine.wire.messages import Usage
from noria.engine.wire.record_store import RecordsFull
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.answering import Answer
from noria.gateway.choice import Delta, Ended, ScoredToken, TextOptions
from noria.gateway.errors import STORE_AWAY, GatewayError, Overloaded, StorageFull
from noria.gateway.generation import Generation
from noria.gateway.responses import response
from noria.gateway.responses.events import EventWriter
from noria.gateway.responses.output import OutputItems, replay
from noria.gateway.responses.parts import Entry, Shown
from noria.gateway.schemas.responses import ResponseRequest
from noria.gateway.schemas.scores import chat_entries

Conclude = Callable[[Shown], Awaitable[Shown]]
"""Keeps a response that has ended, and returns it as it is kept."""


async def as_is(ended: Shown) -> Shown:
    """For responses that are not kept."""
    return ended


class ResponseAnswer(Answer):
    """`begun` is the response at its beginning. Without `events` nothing is rendered but the whole."""

    def __init__(
        self,
        request: ResponseRequest,
        begun: Shown,
        tokenizer: Tokenizer,
        options: TextOptions,
        conclude: Conclude,
        events: EventWriter | None = None,
    ) -> None:
        self._request = request
        self._begun = begun
        self._conclude = conclude
        self._events = events
        self._prewarm = request.prewarm
        self._finish: Ended | None = None
        num_top = request.top_logprobs or 0

        def logprobs(tokens: Sequence[ScoredToken]) -> Sequence[Entry]:
            return chat_entries(tokenizer, tokens, num_top)

        group = str(begun["id"]).partition("_")[2]
        shown = logprobs if request.with_logprobs else None
        self._output = OutputItems(group, parsed=options.parser is not None, logprobs=shown, events=events)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        async for deltas in generation.deltas():
            self.take(deltas)
        return await self.end(generation.usage())

    def opening(self) -> bytes:
        events = self._rendered
        events.event("response.created", response=self._begun)
        if self._request.background:
            events.event("response.queued", response=self._begun)
        events.event("response.in_progress", response={**self._begun, "status": "in_progress"})
        return events.take()

    def of(self, deltas: Sequence[Delta]) -> bytes:
        self.take(deltas)
        return self._rendered.take()

    async def closing(self, usage: Usage) -> bytes:
        events, last = self._rendered, await self.end(usage)
        events.event(f"response.{last['status']}", response=last)
        return events.take()

    def failed(self, error: GatewayError) -> bytes:
        """What was said so far stays said; then why it ends, and the response as it is now."""
        events = self._rendered
        events.event("error", code=error.code, message=error.message, param=error.param)
        events.event("response.failed", response=response.failed(self._begun, error))
        return events.take()

    async def end(self, usage: Usage) -> Shown:
        """The response, ended and kept."""
        if self._prewarm:
            usage = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
            last = response.ended(self._begun, [], usage, "stop")
        else:
            self._output.end(self._finish)
            last = response.ended(self._begun, self._output.items, usage, self._finish)
        try:
            return await self._conclude(last)
        except BrokerUnavailable as error:
            raise Overloaded(STORE_AWAY, retry_after=2) from error
        except RecordsFull as error:
            raise StorageFull(f"The answer cannot be kept: {error}.") from error

    def take(self, deltas: Sequence[Delta]) -> None:
        """What is new, in order."""
        for delta in deltas:
            if not self._prewarm:
                self._output.add(delta)
            self._finish = delta.finish or self._finish

    @property
    def _rendered(self) -> EventWriter:
        assert self._events is not None, "this answer is not streamed"
        return self._events


def replayed(kept: Shown, events: EventWriter) -> bytes:
    """The stream of a response that has ended, its items in one delta each."""
    begun = response.rewound(kept)
    events.event("response.created", response=begun)
    events.event("response.in_progress", response={**begun, "status": "in_progress"})
    replay(kept["output"], events)
    last = kept["status"] if kept["status"] in ("completed", "incomplete", "failed") else "failed"
    events.event(f"response.{last}", response=kept)
    return events.take()
