"""Responses in the store: one record each, with what is shown, what was asked, and what is needed to end it.

Knows records; no text, no queue and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson

from noria.engine.wire.messages import TokenFrame
from noria.engine.wire.record_store import RecordStore
from noria.gateway.errors import InvalidRequest, NotFound
from noria.gateway.records import RESPONSE
from noria.gateway.responses import ids
from noria.gateway.responses.parts import Shown

MAX_CHAIN = 512
"""Responses that one may build on at most."""

RUNNING = ("queued", "in_progress")


class Job(msgspec.Struct, frozen=True):
    """What any gateway needs to read the answer of a background response."""

    body: bytes  # the request as JSON, without its input
    model: str
    prompt_tokens: int
    until: float  # Unix time after which nothing comes any more
    base: str = ""  # the model of an adapter

    @property
    def pool(self) -> str:
        """The model whose engines answer."""
        return self.base or self.model


class StoredResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """`shown` is the response as JSON, `input` its own items as a JSON array, `chain` the ids of the responses before
    it, oldest first. A background response has a `job`, and once it has ended well an `answer`: what the engine said,
    in one frame."""

    shown: bytes
    input: bytes
    chain: list[str] = []
    job: Job | None = None
    answer: list[TokenFrame] | None = None

    @property
    def response(self) -> Shown:
        return orjson.loads(self.shown)  # type: ignore[no-any-return]

    @property
    def input_items(self) -> list[Shown]:
        return orjson.loads(self.input)  # type: ignore[no-any-return]

    def with_response(self, response: Shown, **changes: Any) -> StoredResponse:
        return msgspec.structs.replace(self, shown=orjson.dumps(response), **changes)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredResponse).decode


class ResponseShelf:
    """One per gateway. `ttl` is in seconds. All methods raise BrokerUnavailable."""

    def __init__(self, records: RecordStore, ttl: float) -> None:
        self._records = records
        self._ttl = ttl

    async def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a new response and, for as long, those that it builds on."""
        response = stored.response
        created = response["created_at"]
        await self._records.put(tenant, RESPONSE, response["id"], _encode(stored), created=created, ttl=self._ttl)
        await self._records.touch(tenant, RESPONSE, stored.chain, ttl=self._ttl)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises `NotFound`."""
        found = await self._records.get(tenant, RESPONSE, response_id) if ids.could_be(response_id) else None
        if found is None:
            raise NotFound(f"Response with id '{response_id[:128]}' not found.")
        return _decode(found.body)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises `NotFound`."""
        if not ids.could_be(response_id) or not await self._records.delete(tenant, RESPONSE, response_id):
            raise NotFound(f"Response with id '{response_id[:128]}' not found.")

    async def change(
        self, tenant: str, response_id: str, changed: Callable[[StoredResponse], StoredResponse | None]
    ) -> StoredResponse | None:
        """Replace the record by what `changed` makes of it, which may be asked again; None from there leaves it.
        Returns what is stored then; None: there is no such response (any more)."""
        while True:
            found = await self._records.get(tenant, RESPONSE, response_id)
            if found is None:
                return None
            stored = _decode(found.body)
            new = changed(stored)
            if new is None:
                return stored
            if await self._records.replace_if(tenant, RESPONSE, response_id, found.version, _encode(new)):
                return new

    async def chain(self, tenant: str, response_id: str) -> tuple[list[str], list[Shown]]:
        """The responses up to this one, and all their items, oldest first. Raises `InvalidRequest`."""
        try:
            last = await self.get(tenant, response_id)
        except NotFound:
            raise _no_previous(response_id) from None
        if last.response["status"] in RUNNING:
            message = f"The response '{response_id}' has not ended yet: it cannot be built on."
            raise InvalidRequest(message, param="previous_response_id")
        if len(last.chain) >= MAX_CHAIN:
            message = f"A response builds on {MAX_CHAIN} others at most: send the items yourself, or compact them."
            raise InvalidRequest(message, param="previous_response_id")
        earlier = await self._records.get_many(tenant, RESPONSE, last.chain) if last.chain else []
        turns = []
        for known, found in zip(last.chain, earlier, strict=True):
            if found is None:
                raise _no_previous(known)
            turns.append(_decode(found.body))
        return [*last.chain, response_id], [item for turn in (*turns, last) for item in items_of(turn)]


def items_of(stored: StoredResponse) -> Sequence[Shown]:
    """Its input and its output."""
    return [*stored.input_items, *stored.response["output"]]


def _no_previous(response_id: str) -> InvalidRequest:
    message = f"Previous response with id '{response_id[:128]}' not found."
    return InvalidRequest(message, param="previous_response_id", code="previous_response_not_found")
