"""A background response as the generation path sees it: an answer that anybody may read, and that ends in the store.

Knows the shelves; no queue and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import orjson

from noria.engine.wire.messages import TokenFrame, Usage, encode
from noria.engine.wire.record_store import RecordsFull
from noria.engine.wire.watches import Watches
from noria.gateway.choice import ChoiceReader, TextOptions
from noria.gateway.errors import STORE_AWAY, EngineFault, GatewayError, NotFound, Overloaded, StreamNotFound
from noria.gateway.model_directory import ServedModel
from noria.gateway.responses import response
from noria.gateway.responses.answer import Conclude, ResponseAnswer, as_is
from noria.gateway.responses.context import Shelves
from noria.gateway.responses.events import EventWriter
from noria.gateway.responses.parts import Shown
from noria.gateway.responses.stored import RUNNING, StoredResponse, items_of
from noria.gateway.schemas.responses import ResponseRequest
from noria.gateway.tickets import MAX_ANSWER_BYTES
from noria.gateway.transcript import one_by_one

_PATIENCE = 10.0
"""Seconds in which the store must take an answer that has ended."""


def watch_name(tenant: str, response_id: str) -> str:
    """What a running response is watched under."""
    return orjson.dumps([tenant, response_id]).decode()


def of_watch(name: str) -> tuple[str, str]:
    """Tenant and response id."""
    tenant, response_id = orjson.loads(name)
    return tenant, response_id


class BackgroundTicket:
    """Whoever reads the answer to its end ends the response in the store: the first one wins, all others agree."""

    def __init__(
        self,
        shelves: Shelves,
        watches: Watches,
        tenant: str,
        stored: StoredResponse,
        request: ResponseRequest,
        model: ServedModel,
        options: TextOptions,
        *,
        following: bool,
    ) -> None:
        self.following = following
        self.answer = stored.answer
        self._shelves = shelves
        self._watches = watches
        self._tenant = tenant
        self._stored = stored
        self._begun = response.rewound(stored.response)
        self._request = request
        self._model = model
        self._options = options
        self._ended = asyncio.Event()

    def shape(self, events: EventWriter) -> ResponseAnswer:
        """The stream as one reader sees it."""
        return self._shape(self._as_kept, events)

    async def admitted(self) -> None:
        """The record was there before."""

    async def lost(self, error: GatewayError | None) -> None:
        await self._end(response.failed(self._begun, error or EngineFault("The request was not let in.")), None)

    async def keep(self, answer: Sequence[TokenFrame]) -> None:
        (frame,) = answer
        reader = ChoiceReader(0, self._model.tokenizer, self._options, frame.request_id)
        shape = self._shape(as_is)
        shape.take([reader.accept(piece) for piece in one_by_one(frame)])
        num_prompt = self._stored.job.prompt_tokens if self._stored.job is not None else reader.prompt_tokens
        ended = await shape.end(Usage(num_prompt, reader.num_tokens, reader.cached_tokens, reader.reasoning_tokens))
        await self._end(ended, list(answer))

    def gone(self) -> GatewayError:
        return StreamNotFound("Nothing is left of the stream of this response.")

    async def mark_present(self, window: float) -> None:
        """It runs without anybody."""

    async def somebody_present(self) -> bool:
        return True

    async def _end(self, ended: Shown, answer: list[TokenFrame] | None) -> None:
        def change(stored: StoredResponse) -> StoredResponse | None:
            if stored.response["status"] not in RUNNING:
                return None
            new = stored.with_response(ended, answer=answer)
            too_large = answer is not None and len(encode(answer)) > MAX_ANSWER_BYTES
            return msgspec.structs.replace(new, answer=None) if too_large else new

        response_id = ended["id"]
        stored = await self._shelves.responses.change(self._tenant, response_id, change)
        if stored is not None and stored.response["status"] in ("completed", "incomplete"):
            await self._join_conversation(stored)
        await self._watches.drop(watch_name(self._tenant, response_id))
        self._ended.set()

    async def _join_conversation(self, stored: StoredResponse) -> None:
        if self._request.conversation is not None:
            with suppress(NotFound, RecordsFull):  # deleted meanwhile, or full: the response stays whole
                await self._shelves.conversations.append(self._tenant, self._request.conversation.id, items_of(stored))

    async def _as_kept(self, ended: Shown) -> Shown:
        """A stream's last word waits until the response is kept, by whichever reader."""
        if self.answer is None:
            try:
                await asyncio.wait_for(self._ended.wait(), _PATIENCE)
            except TimeoutError:
                raise Overloaded(STORE_AWAY, retry_after=2) from None
        return (await self._shelves.responses.get(self._tenant, ended["id"])).response

    def _shape(self, conclude: Conclude, events: EventWriter | None = None) -> ResponseAnswer:
        tokenizer = self._model.tokenizer
        return ResponseAnswer(self._request, self._begun, tokenizer, self._options, conclude, events)
