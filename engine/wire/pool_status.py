"""The pools as gateways see them: which models there are, their engines and what waits; looked at for all who ask.

Knows how a pool is read; nothing of requests, and changes nothing but the register's list of those that are gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from noria.engine.wire import keys
from noria.engine.wire.adapters import ListedAdapter, is_staged, parse_list
from noria.engine.wire.connection import REGISTER, SNAPSHOT, AsyncStore, BrokerUnavailable
from noria.engine.wire.messages import CLASSES, EngineStats, ModelCard, decode_card, decode_stats
from noria.engine.wire.slots import Command

FRESH_FOR = 1.0
"""Seconds for which `models()` answers from memory (a failure, and pools that take no requests: a quarter of it)."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One pool as seen now. A pool without engines stays known for `keys.CARD_TTL` seconds."""

    card: ModelCard
    engines: dict[str, EngineStats]  # engines with a live lease
    queued: dict[str, int]  # requests waiting, by class
    queued_tokens: int = 0  # of those: prompt and output at most
    adapters: Mapping[str, ListedAdapter] = field(default_factory=dict)  # that may be asked for, by name

    @property
    def takes_requests(self) -> bool:
        """Whether an engine is there that claims: one that drains ends what it has and goes."""
        return any(not stats.draining for stats in self.engines.values())


class PoolSnapshots:
    """The last look at the pools, shared by everybody in this process."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self.announced: list[str] = []
        """Pools without a card as yet, at the last look."""
        self._pools: list[str] = []
        self._cards: dict[str, tuple[bytes, ModelCard]] = {}
        self._models: list[ModelStatus] = []
        self._error: BrokerUnavailable | None = None
        self._until = 0.0  # monotonic
        self._lock = asyncio.Lock()

    async def models(self) -> list[ModelStatus]:
        """Every known pool, with or without engines; at most `FRESH_FOR` old. Cheap enough for each request."""
        if time.monotonic() >= self._until:
            async with self._lock:  # one look at the store, however many ask
                if time.monotonic() >= self._until:
                    await self._look()
        if self._error is not None:
            raise self._error
        return self._models

    def look_again(self) -> None:
        """What is remembered is not good enough for the next who asks."""
        self._until = 0.0

    async def _look(self) -> None:
        try:
            known = self._pools
            register, *replies = await self._store.run(REGISTER(keys.POOLS, "", 0), *_looks(known))
            snapshots = dict(zip(known, _in_pairs(replies), strict=True))
            self._pools = [model_id.decode() for model_id in register]
            new = [p for p in self._pools if p not in snapshots]
            if new:
                snapshots.update(zip(new, _in_pairs(await self._store.run(*_looks(new))), strict=True))
            statuses = [self._status(p, snapshots[p]) for p in self._pools if snapshots[p][0][0] is not None]
            self._models = [status for status in statuses if status is not None]
            self.announced = [p for p in self._pools if snapshots[p][0][0] is None]
            self._error = None
            serving = any(status.takes_requests for status in self._models)
            self._until = time.monotonic() + (FRESH_FOR if serving else FRESH_FOR / 4)
        except BrokerUnavailable as error:
            self._error = error
            self._until = time.monotonic() + FRESH_FOR / 4

    def _status(self, model_id: str, found: tuple[Sequence[Any], Any]) -> ModelStatus | None:
        (blob, engines, depths, tokens), adapters = found
        known = self._cards.get(model_id)
        try:
            if known is None or known[0] != blob:
                known = self._cards[model_id] = (blob, decode_card(blob))
            stats = {
                engine.decode(): decode_stats(packed) if packed else EngineStats()
                for engine, packed in zip(engines[::2], engines[1::2], strict=True)
            }
        except msgspec.DecodeError as error:  # a pool of another version hides itself, not the others
            log.warning("a pool cannot be read", model=model_id, reason=str(error))
            return None
        listed = {name: entry for name, entry in parse_list(adapters).items() if not is_staged(name)}
        return ModelStatus(known[1], stats, dict(zip(CLASSES, depths, strict=True)), tokens, listed)


def _looks(pools: Sequence[str]) -> Iterator[Command]:
    """Two commands for each pool."""
    for model_id in pools:
        yield SNAPSHOT(keys.pool(model_id))
        yield ("HGETALL", keys.adapters(model_id))


def _in_pairs(replies: Sequence[Any]) -> list[tuple[Sequence[Any], Any]]:
    return list(zip(replies[::2], replies[1::2], strict=True))
