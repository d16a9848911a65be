"""What an operator sees of the pools: depths, tenants, engines and dead letters, read without disturbing anybody.

Knows the keys and how to read them; takes requests off no queue. The dead-letter actions are the only writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from noria.engine.wire import keys
from noria.engine.wire.connection import REGISTER, Store
from noria.engine.wire.gateway_broker import GatewayBroker
from noria.engine.wire.messages import (
    CLASSES,
    EngineStats,
    GenerationRequest,
    decode_card,
    decode_request,
    decode_stats,
)

MOST_DEAD = 1000


class NoSuchLetter(KeyError):
    """No dead letter has this id."""


@dataclass(frozen=True, slots=True)
class TenantView:
    """What one tenant has waiting."""

    tenant: str
    requests: int
    tokens: int  # prompt and output at most


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine with a lease, live or just lapsed (negative)."""

    engine: str
    lease_seconds: float
    held: int  # requests that it owns
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class PoolView:
    """One model's pool as seen now."""

    model: str
    depth: dict[str, int]  # waiting requests by class, suspects among them
    suspects: int  # those in whose company an engine died: an engine tries one of them at a time
    tokens_queued: int
    bytes_queued: int
    tenants: list[TenantView]  # most tokens first
    engines: list[EngineView]
    dead_letters: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up. `request` is None where another version wrote it."""

    model: str
    entry: str  # id in the stream
    request_id: str
    at_ms: int  # Unix time
    attempts: int
    engines: list[str]  # those that died with it
    error: str
    request: GenerationRequest | None


class QueueView:
    """A connection for one look or a few. Every method raises BrokerUnavailable when the store is away."""

    def __init__(self, redis_url: str) -> None:
        """Raises ValueError for a URL that is none."""
        self._url = redis_url
        self._store = Store(redis_url)

    def close(self) -> None:
        self._store.close()

    def pools(self) -> list[PoolView]:
        """Every known pool, by name."""
        return [self._pool(model) for model in self._models()]

    def dead_letters(self) -> list[DeadLetter]:
        """All of them, the newest first, pool by pool."""
        return [letter for model in self._models() for letter in self._dead(model)]

    def find(self, letter_id: str) -> DeadLetter:
        """By the request's id, or by the entry's. Raises NoSuchLetter."""
        for letter in self.dead_letters():
            if letter_id in (letter.request_id, letter.entry):
                return letter
        raise NoSuchLetter(letter_id)

    def drop(self, letter: DeadLetter) -> None:
        """Delete it; a no-op where that has been done."""
        self._store.run(("XDEL", keys.dead(letter.model), letter.entry))

    async def requeue(self, letter: DeadLetter) -> None:
        """Give it to the engines once more, at the end of its tenant's queue and with all its attempts, and delete the
        letter. Its client was told of the error long ago, so its answer goes to its log, where it can be read for ten
        minutes, and its deadline no longer counts. Raises ValueError where it cannot be run, and QueueFull."""
        if letter.request is None:
            raise ValueError(f"{letter.request_id} was written by another version and cannot be read")
        (blob,) = self._store.run(("GET", keys.card(letter.model)))
        if blob is None:
            raise ValueError(f"{letter.model} has had no engine for long: start one first")
        request = msgspec.structs.replace(letter.request, logged=True, deadline_ms=None)
        broker = GatewayBroker(self._url)
        try:
            await broker.enqueue(request, decode_card(blob))
        finally:
            await broker.close()
        self.drop(letter)

    def _models(self) -> list[str]:
        (ids,) = self._store.run(REGISTER(keys.POOLS, "", 0))
        return sorted(model_id.decode() for model_id in ids)

    def _pool(self, model: str) -> PoolView:
        pool = keys.pool(model)
        dead, suspects, stats, tenants = self._store.run(
            ("XLEN", keys.dead(model)),
            ("ZCARD", pool + "suspects"),
            ("HMGET", pool + "stats", "tokens", "bytes", *CLASSES),
            ("HGETALL", pool + "tenants"),
        )
        tokens, size, *depths = (int(value or 0) for value in stats)
        return PoolView(
            model=model,
            depth=dict(zip(CLASSES, depths, strict=True)),
            suspects=suspects,
            tokens_queued=tokens,
            bytes_queued=size,
            tenants=_tenants(_mapping(tenants)),
            engines=self._engines(pool),
            dead_letters=dead,
        )

    def _engines(self, pool: str) -> list[EngineView]:
        (seconds, micros), leases, packed = self._store.run(
            ("TIME",), ("ZRANGE", pool + "engines", 0, -1, "WITHSCORES"), ("HGETALL", pool + "engine_stats")
        )
        now = int(seconds) + int(micros) / 1e6
        stats = _mapping(packed)
        expiries = _mapping(leases).items()
        owned = self._store.run(*(("HLEN", pool + "owned:" + engine.decode()) for engine, _ in expiries))
        return [
            EngineView(engine.decode(), float(expiry) / 1000 - now, held, _stats(stats.get(engine)))
            for (engine, expiry), held in zip(expiries, owned, strict=True)
        ]

    def _dead(self, model: str) -> list[DeadLetter]:
        (entries,) = self._store.run(("XREVRANGE", keys.dead(model), "+", "-", "COUNT", MOST_DEAD))
        return [_letter(model, entry.decode(), _mapping(fields)) for entry, fields in entries]


@contextmanager
def open_view(redis_url: str) -> Iterator[QueueView]:
    """A view, closed at the end."""
    view = QueueView(redis_url)
    try:
        yield view
    finally:
        view.close()


def _mapping(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _tenants(counts: dict[bytes, bytes]) -> list[TenantView]:
    found = []
    for field, number in counts.items():
        name, _, tenant = field.decode().partition(":")
        if name == "depth":
            found.append(TenantView(tenant, int(number), int(counts.get(f"tokens:{tenant}".encode(), 0))))
    return sorted(found, key=lambda view: (-view.tokens, view.tenant))


def _stats(packed: bytes | None) -> EngineStats:
    try:
        return decode_stats(packed) if packed else EngineStats()
    except msgspec.DecodeError:  # an engine of another version
        return EngineStats()


def _letter(model: str, entry: str, fields: dict[bytes, bytes]) -> DeadLetter:
    try:
        request = decode_request(fields[b"request"])
    except (msgspec.DecodeError, KeyError):
        request = None
    return DeadLetter(
        model=model,
        entry=entry,
        request_id=fields.get(b"id", b"").decode(),
        at_ms=int(entry.partition("-")[0]),
        attempts=int(fields.get(b"attempts", b"0")),
        engines=fields.get(b"engines", b"").decode().split(),
        error=fields.get(b"error", b"").decode(),
        request=request,
    )
