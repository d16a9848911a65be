"""What the store remembers of a request that more than one connection may ask for: its ticket.

A ticket ties an Idempotency-Key or a resumable stream's id to the ids of the requests on the queue, scoped to the
tenant. Knows no endpoint's shape and no frames' meaning.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from noria.engine.wire.broker import BrokerUnavailable, GatewayBroker
from noria.engine.wire.messages import TokenFrame
from noria.gateway.cursor import MalformedId, completion_of
from noria.gateway.delivery import Delivery
from noria.gateway.errors import STORE_AWAY, GatewayError, IdempotencyConflict, Overloaded, StreamNotFound

KEPT_FOR = 24 * 3600.0
"""Seconds that an Idempotency-Key is remembered."""

MAX_ANSWER_BYTES = 1024 * 1024
"""An answer above this is not kept for the whole time: it can be had while its log lives."""

_LOG_LIFE = 600.0
_ADMISSION = 30.0
"""Seconds after which a gateway that was about to put a request on the queue is taken for dead."""

_PATIENCE = 3.0
"""Seconds that a repeat waits for the first request to be let in."""

NOT_FOUND = (
    "No stream with this event id is known here: it never was, ended too long ago, or is another's. "
    "Please send the request again without Last-Event-ID."
)
RESULT_GONE = "The answer to the first request with this Idempotency-Key is no longer kept. Please use a new key."


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """As it lies in the store. `answer` has one frame per choice, once all ended well."""

    digest: bytes
    group: str
    created: int  # Unix seconds
    fingerprint: str
    admitted: bool = False
    answer: list[TokenFrame] | None = None


def new_record(delivery: Delivery, fingerprint: str) -> Record:
    """The record of an answer that begins now."""
    return Record(delivery.digest, secrets.token_hex(14), int(time.time()), fingerprint)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Ticket(Protocol):
    """An answer that more than one connection may read, as the store knows it. `following`: another connection has put
    its requests on the queue already. `answer`: one frame per choice, where it is kept whole."""

    @property
    def following(self) -> bool: ...

    @property
    def answer(self) -> Sequence[TokenFrame] | None: ...

    async def admitted(self) -> None:
        """The requests are on the queue: from now on others may follow."""

    async def lost(self, error: GatewayError | None) -> None:
        """It ended without an answer: with an error, or because nobody wants it any more."""

    async def keep(self, answer: Sequence[TokenFrame]) -> None:
        """All choices ended well."""

    def gone(self) -> GatewayError:
        """The error for an answer of which nothing is left."""

    async def mark_present(self, window: float) -> None:
        """A client is, or was just now, attached: nobody may cancel for `window` seconds."""

    async def somebody_present(self) -> bool: ...


class IssuedTicket:
    """The ticket of an answer that a client's headers name: by an Idempotency-Key, or by an event of its stream."""

    def __init__(
        self, broker: GatewayBroker, tenant: str, record: Record, completion_id: str, key: str | None, life: float
    ) -> None:
        self.record = record
        self.completion_id = completion_id
        self.following = record.admitted
        self._broker = broker
        self._tenant = tenant
        self._key = key  # the record's name for the Idempotency-Key
        self._life = life

    @property
    def answer(self) -> Sequence[TokenFrame] | None:
        return self.record.answer

    async def admitted(self) -> None:
        self.record = msgspec.structs.replace(self.record, admitted=True)
        packed = _encode(self.record)
        await self._broker.replace(self._tenant, _stream(self.completion_id), packed, self._life)
        if self._key is not None:
            await self._broker.replace(self._tenant, self._key, packed, KEPT_FOR)

    async def lost(self, error: GatewayError | None) -> None:
        """The key means nothing any more: a repeat is a new request."""
        if self._key is not None:
            await self._broker.forget(self._tenant, self._key)

    async def keep(self, answer: Sequence[TokenFrame]) -> None:
        """For as long as the key."""
        if self._key is None or self.record.answer is not None:
            return
        packed = _encode(msgspec.structs.replace(self.record, answer=list(answer)))
        if len(packed) <= MAX_ANSWER_BYTES:
            await self._broker.replace(self._tenant, self._key, packed, KEPT_FOR)

    def gone(self) -> GatewayError:
        if self._key is not None:
            return IdempotencyConflict(RESULT_GONE, code="idempotency_result_expired")
        return StreamNotFound(NOT_FOUND)

    async def mark_present(self, window: float) -> None:
        await self._broker.replace(self._tenant, f"present:{self.completion_id}", b"1", window)

    async def somebody_present(self) -> bool:
        return await self._broker.recall(self._tenant, f"present:{self.completion_id}") is not None


class TicketOffice:
    """Issues tickets."""

    def __init__(self, broker: GatewayBroker, request_timeout: float) -> None:
        self._broker = broker
        self._life = request_timeout + _LOG_LIFE

    async def issue(
        self, tenant: str, delivery: Delivery, prefix: str, fingerprint: str, num_requests: int
    ) -> IssuedTicket:
        """The ticket of a new answer made by `num_requests`, or of the one that the client's headers point to.

        Raises `StreamNotFound`, `IdempotencyConflict`, and `Overloaded` while the store is away.
        """
        try:
            async with asyncio.timeout(_PATIENCE + 1):
                if delivery.last_event is not None:
                    return await self._of_stream(tenant, delivery, prefix)
                record = new_record(delivery, fingerprint)
                if delivery.key is not None:
                    return await self._of_key(tenant, _name(delivery.key), record, prefix, num_requests)
        except (BrokerUnavailable, TimeoutError) as error:
            raise Overloaded(STORE_AWAY, retry_after=2) from error
        return self._ticket(tenant, record, prefix, None)

    def _ticket(self, tenant: str, record: Record, prefix: str, key: str | None) -> IssuedTicket:
        return IssuedTicket(self._broker, tenant, record, prefix + record.group, key, self._life)

    async def forget(self, tenant: str, key: str) -> None:
        """Keep nothing more under the Idempotency-Key: its answer lies elsewhere."""
        await self._broker.forget(tenant, _name(key))

    async def _of_stream(self, tenant: str, delivery: Delivery, prefix: str) -> IssuedTicket:
        assert delivery.last_event is not None
        try:
            completion_id = completion_of(delivery.last_event)
        except MalformedId:
            raise StreamNotFound(NOT_FOUND, param="Last-Event-ID") from None
        packed = await self._broker.recall(tenant, _stream(completion_id))
        if packed is None:
            raise StreamNotFound(NOT_FOUND, param="Last-Event-ID")
        record = _decode(packed)
        if record.digest != delivery.digest or not completion_id.startswith(prefix):
            message = "This Last-Event-ID belongs to a request with another body: send the same body to go on."
            raise IdempotencyConflict(message, param="Last-Event-ID", code="stream_body_mismatch")
        return IssuedTicket(self._broker, tenant, record, completion_id, None, self._life)

    async def _of_key(self, tenant: str, key: str, fresh: Record, prefix: str, num_requests: int) -> IssuedTicket:
        """The ticket under the key: of `fresh` if there was none."""
        packed, until = _encode(fresh), time.monotonic() + _PATIENCE
        while True:
            known = await self._broker.remember(tenant, key, packed, _ADMISSION)
            if known is None:
                return self._ticket(tenant, fresh, prefix, key)
            record = _decode(known)
            if record.digest != fresh.digest:
                message = "This Idempotency-Key was used for a request with another body or endpoint: use a new key."
                raise IdempotencyConflict(message, param="Idempotency-Key")
            if record.admitted:
                return self._ticket(tenant, record, prefix, key)
            if time.monotonic() > until:
                # Its gateway may have died before it could note that the last request was on the queue.
                if await self._broker.has_frames(request_ids(record.group, num_requests)[-1]):
                    late = self._ticket(tenant, record, prefix, key)
                    await late.admitted()
                    return self._ticket(tenant, late.record, prefix, key)
                message = "The first request with this Idempotency-Key is still being let in. Please try again."
                raise IdempotencyConflict(message, param="Idempotency-Key", code="idempotency_key_in_use")
            await asyncio.sleep(0.05)


def request_ids(group: str, num_requests: int) -> list[str]:
    """The ids of an answer's requests, in the order in which they are put on the queue."""
    return [f"{group}-{place}" for place in range(num_requests)]


def _name(key: str) -> str:
    return f"key:{hashlib.sha256(key.encode()).hexdigest()}"


def _stream(completion_id: str) -> str:
    return f"stream:{completion_id}"
