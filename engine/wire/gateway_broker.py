"""The gateway's face of the broker: submit, cancel, read frames and logs, remember, see the models, reap. asyncio.

Knows queues and streams; knows nothing of HTTP, text or scheduling.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import structlog

from noria.engine.wire import backpressure, keys
from noria.engine.wire.adapters import GatewayAdapterLists
from noria.engine.wire.backpressure import QueueFull, QueueLimits, QueuePosition, TenantQueueFull
from noria.engine.wire.connection import (
    CANCEL,
    ENQUEUE,
    LOG,
    MAX_BLOCK,
    POSITION,
    RELEASE,
    AsyncStore,
    BrokerUnavailable,
    StoreFault,
)
from noria.engine.wire.engine_broker import DEAD_LENGTH, MAX_DEATHS
from noria.engine.wire.messages import (
    CLASSES,
    GenerationRequest,
    ModelCard,
    TokenFrame,
    TokenizerFiles,
    decode_frames,
    decode_tokenizer,
    encode,
)
from noria.engine.wire.pool_status import ModelStatus, PoolSnapshots
from noria.engine.wire.publish import POISON, final_publications, publication, published
from noria.engine.wire.slots import Command

STREAM_TTL = 30.0
"""Seconds that a gateway's stream outlives its last renewal."""

HOUSEKEEPING_EVERY = 1.0
"""Seconds between renewals of the stream and between reapings."""
LOOKS_MISSED = 3
"""Reapings left out by all gateways that say that the store was away."""
COMEBACK = 5.0
"""Seconds that engines then have to renew their leases: they try every second."""

DAY = 86_400.0
"""Seconds that a log without an end is kept."""

LOG_LOOK_EVERY = 0.1
"""Seconds between two looks at a log that has nothing new. Looking instead of blocking needs no connection each."""

MAX_PRIORITY = 2**20
"""Priorities beyond this, either way, count as this."""

WEIGHTS = (1e-3, 1e3)
"""The least and the greatest weight of a tenant."""

TRIM_EVERY = 64
"""Stream entries read between two trims."""

log = structlog.get_logger(__name__)


__all__ = ["GatewayBroker", "ModelStatus", "QueueFull", "QueueLimits", "QueuePosition", "TenantQueueFull"]


class GatewayBroker:
    """One gateway process' connection to the store. All methods raise BrokerUnavailable and StoreFault unless they say
    otherwise."""

    def __init__(
        self,
        redis_url: str,
        *,
        boot_id: str | None = None,
        stream_ttl: float = STREAM_TTL,
        limits: QueueLimits | None = None,
    ) -> None:
        self.boot_id = boot_id or secrets.token_hex(8)
        self._store = AsyncStore(redis_url)
        self._reader = AsyncStore(redis_url, block=MAX_BLOCK)
        self._stream = keys.frames(self.boot_id)
        self._stream_ttl_ms = int(stream_ttl * 1000)
        self._limits = limits or QueueLimits()
        self._last_read: bytes = b"0-0"
        self._snapshots = PoolSnapshots(self._store)
        self.adapters = GatewayAdapterLists(self._store)
        self._housekeeping: asyncio.Task[None] | None = None
        self._closed = False

    def limit(self, limits: QueueLimits) -> None:
        """Bound the queues so from the next request on."""
        self._limits = limits

    async def start(self) -> None:
        """Connect, create this gateway's stream, and keep house from now on: renew it, reap engines that died."""
        await self._keep_stream()
        with suppress(BrokerUnavailable):  # a hosted store may refuse CONFIG
            (reply,) = await self._store.run(("CONFIG", "GET", "maxmemory-policy"))
            policy = _config_value(reply)
            if policy not in ("", "noeviction"):
                log.warning("the store may evict queued requests", maxmemory_policy=policy, wanted="noeviction")
        self._housekeeping = asyncio.create_task(self._keep_house(), name="broker-housekeeping")

    async def close(self) -> None:
        """Stop housekeeping, drop the stream and all connections. Does not raise."""
        self._closed = True
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._housekeeping
        with suppress(BrokerUnavailable):
            await self._store.run(("DEL", self._stream))
        await self._store.close()
        await self._reader.close()

    async def ping(self) -> bool:
        """True when the store answers. Does not raise."""
        try:
            await self._store.run(("PING",))
        except BrokerUnavailable:
            return False
        return True

    async def models(self) -> list[ModelStatus]:
        """Every known pool, with or without engines; see `PoolSnapshots.models`."""
        return await self._snapshots.models()

    def look_again(self) -> None:
        """Let the next `models` ask the store."""
        self._snapshots.look_again()

    def announced(self) -> list[str]:
        """Ids of pools whose engines are still loading, as `models` saw them last; their tokenizers are there."""
        return self._snapshots.announced

    async def tokenizer(self, model_id: str) -> TokenizerFiles:
        """The model's tokenizer and template files. Raises KeyError for a pool that is not known."""
        (blob,) = await self._store.run(("GET", keys.tokenizer(model_id)))
        if blob is None:
            raise KeyError(model_id)
        return decode_tokenizer(blob)

    async def enqueue(self, request: GenerationRequest, card: ModelCard) -> None:
        """Put the request into its pool's queue; a no-op where it is already known.

        Raises TenantQueueFull, QueueFull, and ValueError for a service class or a weight that is none.
        """
        if request.service_class not in CLASSES:
            raise ValueError(f"unknown service class {request.service_class!r}")
        if not WEIGHTS[0] <= request.weight <= WEIGHTS[1]:
            raise ValueError(f"a weight lies between {WEIGHTS[0]:g} and {WEIGHTS[1]:g}, not {request.weight}")
        log_key, opened = keys.log(request.id), False
        if request.logged:  # before the request, so that no frame comes too early
            (reply,) = await self._store.run(LOG(log_key, "", int(DAY * 1000)))
            opened = reply == 1
        (reply,) = await self._store.run(self._enqueue(request, card))
        if reply[0] in (b"full", b"tenant_full"):
            if opened:
                await self._store.run(("DEL", log_key))
            raise backpressure.full(card.pool, reply)

    def _enqueue(self, request: GenerationRequest, card: ModelCard) -> Command:
        max_tokens = request.sampling.max_tokens
        prompt = len(request.prompt)
        reserved = prompt + (max_tokens if card.reserve_output else min(max_tokens, 1))
        limits = self._limits
        return ENQUEUE(
            keys.pool(card.pool),
            request.id,
            encode(request),
            request.service_class,
            request.tenant,
            request.gateway,
            card.kv_blocks(reserved, prompt),
            # With windows the cost is near its limit soon, and stays what it is when a request is put back.
            0 if card.reserve_output or card.kv_limits else card.block_size,
            prompt,
            prompt + max_tokens,
            request.weight,
            "" if request.deadline_ms is None else request.deadline_ms,
            max(-MAX_PRIORITY, min(request.priority, MAX_PRIORITY)),
            int(request.logged),
            limits.depth,
            limits.size,
            limits.tenant_depth,
            limits.tenant_size,
            request.account,
            0 if request.copy else prompt,
        )

    async def position(self, model_id: str, request_id: str) -> QueuePosition | None:
        """Where the request stands in the queue; None: it is not waiting (any more)."""
        (reply,) = await self._store.run(POSITION(keys.pool(model_id), request_id))
        return None if reply is None else backpressure.position(reply)

    async def cancel(self, model_id: str, request_id: str, counted: int | None = None, why: str = "") -> None:
        """End a queued request (its last frame is published) or tell its engine; a no-op where it has ended. For the
        ledger: `counted` output tokens have reached its client (None: all), and it ended for the reason `why`."""
        args = (request_id, "" if counted is None else counted, why)
        (reply,) = await self._store.run(CANCEL(keys.pool(model_id), *args))
        if reply[0] == b"queued":
            await self._publish(model_id, [ending for ending in reply[1:] if ending])

    async def log_frames(self, request_id: str) -> AsyncIterator[list[TokenFrame]]:
        """Frames of a logged request from its first one on, then live, up to its last one.

        A frame may come twice, as in `frames`. Raises KeyError where there is no such log, or no longer.
        """
        key, last_read = keys.log(request_id), b"0-0"
        while not self._closed:
            exists, reply = await self._store.run(("EXISTS", key), ("XREAD", "COUNT", 1000, "STREAMS", key, last_read))
            if not exists:
                raise KeyError(request_id)
            if not reply:
                await asyncio.sleep(LOG_LOOK_EVERY)
                continue
            ((_, entries),) = reply
            last_read = entries[-1][0]
            frames = [frame for _, fields in entries if b"f" in fields for frame in _unpack(fields[b"f"])]
            if frames:
                yield frames
            if any(frame.finish for frame in frames):
                return

    async def has_frames(self, request_id: str) -> bool:
        """Whether an engine has begun to answer this logged request, as far as its log still says."""
        (length,) = await self._store.run(("XLEN", keys.log(request_id)))
        return int(length) > 1  # the first entry opens it

    async def remember(self, tenant: str, name: str, record: bytes, ttl: float) -> bytes | None:
        """Keep `record` under the tenant's `name` for `ttl` seconds, unless there is one: then that is returned.

        A record that is the very same counts as ours, so that the call may be repeated: make records unique.
        """
        key = keys.record(tenant, name)
        # Two commands: the client makes a mere yes or no of what SET with GET answers.
        _, there = await self._store.run(("SET", key, record, "NX", "PX", _ms(ttl)), ("GET", key))
        return None if there is None or there == record else bytes(there)

    async def replace(self, tenant: str, name: str, record: bytes, ttl: float) -> None:
        """Keep `record` under the tenant's `name` for `ttl` seconds, whatever was there."""
        await self._store.run(("SET", keys.record(tenant, name), record, "PX", _ms(ttl)))

    async def recall(self, tenant: str, name: str) -> bytes | None:
        """The record under the tenant's `name`; None: there is none."""
        (record,) = await self._store.run(("GET", keys.record(tenant, name)))
        return None if record is None else bytes(record)

    async def forget(self, tenant: str, name: str) -> None:
        """Drop the record under the tenant's `name`, if there is one."""
        await self._store.run(("DEL", keys.record(tenant, name)))

    async def reap(self, model_id: str) -> int:
        """Put back what engines past their lease held, end what is poison or past its deadline; returns how many
        requests were put back. Any gateway, any time: `start` does it every second for every pool. Where nobody did for
        a while, the store was away for engines too, and they have `COMEBACK` to renew."""
        (reply,) = await self._store.run(
            RELEASE(
                keys.pool(model_id), "", 1, MAX_DEATHS, DEAD_LENGTH, POISON,
                _ms(LOOKS_MISSED * HOUSEKEEPING_EVERY), _ms(COMEBACK),
            )
        )  # fmt: skip
        requeued, buried, endings = reply
        if requeued or buried:
            log.warning("an engine died", model=model_id, requeued=requeued, dead_lettered=buried)
        await self._publish(model_id, endings)
        return int(requeued)

    async def frames(self) -> AsyncIterator[list[TokenFrame]]:
        """Frames for this gateway in the order of publication, until `close`. Outages are waited out; reading goes on
        behind the last entry read. A frame may come twice (engines repeat after a lost reply): see `TokenFrame`."""
        pause, unread_trims = 0.0, 0
        while not self._closed:
            await asyncio.sleep(pause)
            try:
                entries = await self._read()
                if unread_trims + len(entries) >= TRIM_EVERY:
                    unread_trims = -len(entries)
                    await self._store.run(("XTRIM", self._stream, "MINID", self._last_read))
            except BrokerUnavailable as error:
                if not pause and not self._closed:
                    log.warning("frames are not being read", reason=str(error))
                pause = min(1.0, 2 * pause or 0.05)
                continue
            pause = 0.0
            unread_trims += len(entries)
            frames = [frame for packed in entries for frame in _unpack(packed)]
            if frames:
                yield frames

    async def _read(self) -> list[bytes]:
        block = int(MAX_BLOCK * 1000)
        (reply,) = await self._reader.run(
            ("XREAD", "COUNT", 1000, "BLOCK", block, "STREAMS", self._stream, self._last_read)
        )
        if not reply:
            return []
        ((_, entries),) = reply
        self._last_read = entries[-1][0]
        return [fields[b"f"] for _, fields in entries if b"f" in fields]

    async def _publish(self, model_id: str, endings: Sequence[Sequence[Any]]) -> None:
        """Should this fail, the next reaper of any gateway publishes them."""
        if endings:
            commands = [publication(key, rows) for key, rows in final_publications(endings).items()]
            await self._store.run(*commands, *published(keys.pool(model_id), endings))

    async def _keep_house(self) -> None:
        away = False
        while not self._closed:
            await asyncio.sleep(HOUSEKEEPING_EVERY * random.uniform(0.8, 1.2))
            try:
                await self._keep_stream()
                for status in await self.models():
                    try:
                        await self.reap(status.card.id)
                    except StoreFault as error:  # a fault in one pool holds up no other
                        log.error("a pool cannot be reaped", model=status.card.id, reason=str(error))
            except BrokerUnavailable as error:
                if not away:
                    log.error("the store is away", reason=str(error))
                away = True
            except Exception:  # whatever it is, without housekeeping every open stream would end
                log.exception("housekeeping failed")
            else:
                if away:
                    log.info("the store is back")
                away = False

    async def _keep_stream(self) -> None:
        """Renew this gateway's stream; make it anew where it expired (this process slept) or was lost."""
        (renewed,) = await self._store.run(("PEXPIRE", self._stream, self._stream_ttl_ms))
        if not renewed:
            self._last_read = b"0-0"
            await self._store.run(
                ("XADD", self._stream, "*", "boot", self.boot_id),
                ("PEXPIRE", self._stream, self._stream_ttl_ms),
            )


def _unpack(packed: bytes) -> list[TokenFrame]:
    try:
        return decode_frames(packed)
    except msgspec.DecodeError as error:  # an engine of another version; its requests end by their deadlines
        log.error("frames cannot be read", reason=str(error))
        return []


def _config_value(reply: Any) -> str:
    """The value in a CONFIG GET reply: the client library may have made a mapping of it."""
    values = list(reply.values()) if isinstance(reply, dict) else list(reply[1::2])
    value = values[0] if values else ""
    return value.decode() if isinstance(value, bytes) else str(value)


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
