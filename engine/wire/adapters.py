"""The adapters of a pool: the list that gateways read and engines follow, and what each engine says became of them.

Knows the store's keys; not what an adapter computes, and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from noria.engine.wire import keys
from noria.engine.wire.connection import AsyncStore, Store
from noria.engine.wire.messages import AdapterRef

MAX_ADAPTERS = 64
"""Of one pool, so that nobody fills the engines' memory by mistake."""

LOAD_TIME = 60.0
"""Seconds that engines have to load an adapter."""

_REPORT_TTL = 30.0
"""Seconds that an engine's word on its adapters outlives the engine."""

_STAGE = "\0"
"""In front of its name on the list: engines are to load the adapter, and nobody may ask for it yet."""


class ListedAdapter(msgspec.Struct, frozen=True):
    """An adapter on its pool's list. `mark` tells this entry from any other of the name. The digest is empty as long as
    no engine has told it. `at_start`: engines were started with it."""

    ref: AdapterRef
    created: int  # Unix seconds
    mark: str
    at_start: bool = False


class AdapterReport(msgspec.Struct, frozen=True):
    """What became of the entry with this `mark` at one engine: loaded, with the digest of its files, or why not."""

    mark: str
    digest: str = ""
    error: str = ""


def staged(name: str) -> str:
    """How an adapter that is not ready yet goes on the list."""
    return _STAGE + name


def is_staged(name: str) -> bool:
    return name.startswith(_STAGE)


def check_name(name: str) -> str:
    """The name, where it can be one of a model. Raises ValueError."""
    if not 0 < len(name) <= 128 or not name.isprintable() or name != name.strip() or "," in name or name == "*":
        what = "a name has 1 to 128 printable characters, no comma among them and no space around them, and is not *"
        raise ValueError(what)
    return name


_decode_listed = msgspec.msgpack.Decoder(ListedAdapter).decode
_decode_reports = msgspec.msgpack.Decoder(dict[str, AdapterReport]).decode


def parse_list(reply: Any) -> dict[str, ListedAdapter]:
    """A list as HGETALL answers it, by name, staged ones as `staged` has them. Entries of another version are left
    out."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    listed: dict[str, ListedAdapter] = {}
    for name, packed in pairs:
        try:
            listed[name.decode()] = _decode_listed(packed)
        except msgspec.DecodeError:
            continue
    return listed


def _is_void(entry: ListedAdapter) -> bool:
    """Of a staged one: nobody waits for it any more."""
    return time.time() - entry.created > 2 * LOAD_TIME


class EngineAdapterList:
    """An engine's end. One thread at a time. Methods raise BrokerUnavailable and StoreFault."""

    def __init__(self, redis_url: str, model_id: str, engine_id: str) -> None:
        self._store = Store(redis_url)
        self._model_id = model_id
        self._engine_id = engine_id

    def enter(self, refs: Sequence[AdapterRef]) -> None:
        """List what this engine was started with. Where no other engine is there, what earlier ones were started with
        goes; what was loaded while they ran stays."""
        name = keys.adapters(self._model_id)
        clock, reply = self._store.run(("TIME",), ("HGETALL", name))
        (others,) = self._store.run(("ZCOUNT", keys.engines(self._model_id), int(clock[0]) * 1000, "+inf"))
        listed, own = parse_list(reply), {ref.name for ref in refs}
        stale = [n for n, entry in listed.items() if entry.at_start and n not in own] if not others else []
        if stale:
            self._store.run(("HDEL", name, *stale))
        created = int(time.time())
        for ref in refs:
            entry = ListedAdapter(ref, created, mark=ref.digest, at_start=True)
            if ref.name not in listed or listed[ref.name].ref != ref:
                self._store.run(("HSET", name, ref.name, msgspec.msgpack.encode(entry)))

    def taken(self, names: Collection[str]) -> list[str]:
        """Those that other models go by: there nobody would find an adapter."""
        (known,) = self._store.run(("ZRANGE", keys.POOLS, 0, -1))
        return sorted({model_id.decode() for model_id in known} & set(names) - {self._model_id})

    def listed(self) -> dict[str, ListedAdapter]:
        """Those left out that a gateway began to load and did not live to end."""
        (reply,) = self._store.run(("HGETALL", keys.adapters(self._model_id)))
        return {name: e for name, e in parse_list(reply).items() if not (is_staged(name) and _is_void(e))}

    def report(self, reports: Mapping[str, AdapterReport]) -> None:
        """This engine's word on all listed adapters, by name."""
        key, packed = keys.adapter_reports(self._model_id, self._engine_id), msgspec.msgpack.encode(dict(reports))
        self._store.run(("SET", key, packed, "PX", int(_REPORT_TTL * 1000)))

    def close(self) -> None:
        self._store.close()


class GatewayAdapterLists:
    """A gateway's end. Methods raise BrokerUnavailable and StoreFault."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store

    async def listed(self, model_id: str) -> dict[str, ListedAdapter]:
        (reply,) = await self._store.run(("HGETALL", keys.adapters(model_id)))
        return parse_list(reply)

    async def stage(self, model_id: str, entry: ListedAdapter) -> bool:
        """Let the engines load it. False where they are loading one of this name already."""
        key, field, packed = keys.adapters(model_id), staged(entry.ref.name), msgspec.msgpack.encode(entry)
        there, found = await self._store.run(("HSETNX", key, field, packed), ("HGET", key, field))
        if there or found == packed:  # the latter where the command was repeated
            return True
        if found is not None and not _is_void(_decode_listed(found)):
            return False
        await self._store.run(("HSET", key, field, packed))  # who began that one is dead
        return True

    async def confirm(self, model_id: str, entry: ListedAdapter) -> None:
        """From now on it may be asked for, in place of any other of its name."""
        await self._store.run(("HSET", keys.adapters(model_id), entry.ref.name, msgspec.msgpack.encode(entry)))

    async def take_off(self, model_id: str, name: str) -> bool:
        """False where there was no such entry."""
        (number,) = await self._store.run(("HDEL", keys.adapters(model_id), name))
        return bool(number)

    async def reports(self, model_id: str, engine_ids: Sequence[str]) -> list[dict[str, AdapterReport]]:
        """Of each engine, by the name on the list; empty where it has said nothing yet."""
        replies = await self._store.run(*(("GET", keys.adapter_reports(model_id, engine)) for engine in engine_ids))
        return [{} if packed is None else _decode_reports(packed) for packed in replies]
