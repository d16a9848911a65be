"""The scripts on an organisation's books, and the work that any gateway does on them: posting what ended, giving back
what nobody took up.

Knows the pools' ledgers and the reservations; no request and no HTTP.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from noria.engine.wire import keys
from noria.engine.wire.connection import AsyncStore, BrokerUnavailable, StoreFault, load_script
from noria.gateway.tenancy import names
from noria.gateway.tenancy.directory import Directory
from noria.gateway.tenancy.ledger import Entry, asked_for, read_entry
from noria.gateway.tenancy.limits import Gate, Tariff
from noria.gateway.tenancy.watches import Watch, watches_of

_LUA = Path(__file__).parent / "lua"
ADMIT = load_script(_LUA, "books", "admit")
WITHDRAW = load_script(_LUA, "books", "withdraw")
WAITING = load_script(_LUA, "books", "waiting")
OVERDUE = load_script(_LUA, "books", "overdue")
POST = load_script(_LUA, "books", "post")

EVERY = 1.0
"""Seconds between two rounds, if nothing asks for one sooner."""

SOON = 0.02
"""Seconds after the end of a request at which its entry is looked for: several ends make one round."""

AT_ONCE = 200
HOLD_MS = 10_000
"""Milliseconds after which somebody looks whether a reservation's request is there, and between two such looks."""

FRESH_FOR = 1.0
"""Seconds for which prices and budgets are known without a look."""

log = structlog.get_logger(__name__)
pack = msgspec.msgpack.Encoder().encode


class Books:
    """One per gateway. All methods but `run` raise BrokerUnavailable and StoreFault."""

    def __init__(self, store: AsyncStore, directory: Directory, *, ledger_days: int, usage_days: int) -> None:
        self._store = store
        self._directory = directory
        self._lives = (ledger_days * 86_400_000, usage_days * 86_400_000)
        self._known: set[str] = set()  # models whose ledger is registered
        self._tariffs: dict[str, tuple[float, Tariff]] = {}  # by model, each with the moment until which it is known
        self._soon = asyncio.Event()

    def nudge(self) -> None:
        """A request has ended, or is about to."""
        self._soon.set()

    async def tariff(self, model: str, base: str) -> Tariff:
        """That of `base` where `model`, one of its adapters, has no price of its own."""
        until, known = self._tariffs.get(model, (0.0, Tariff()))
        if time.monotonic() >= until:
            price = await self._directory.price(model) or await self._directory.price(base)
            known = Tariff() if price is None else Tariff.of(price)
            self._tariffs[model] = time.monotonic() + FRESH_FOR, known
        return known

    async def register(self, model: str) -> None:
        """From now on the model's ledger is posted, whether it is served or not."""
        if model not in self._known:
            await self._store.run(("SADD", names.LEDGERS, model))
            self._known.add(model)

    async def admit(self, organization_id: str, spec: Sequence[Any]) -> Sequence[Any]:
        (reply,) = await self._store.run(ADMIT(names.organization(organization_id), pack(spec)))
        found: Sequence[Any] = reply
        return found

    async def withdraw(self, organization_id: str, reservation: str, parts: Sequence[str]) -> None:
        await self._store.run(WITHDRAW(names.organization(organization_id), reservation, *parts))

    async def note_claimed(self, organization_id: str, gate: Gate) -> None:
        """Requests that an engine has taken wait no more. Asked when a queue seems full, so that those who never fill
        one pay nothing for it."""
        name, _ = gate.packed()
        (found,) = await self._store.run(WAITING(names.organization(organization_id), name))
        looks = [(i, keys.request(pool.decode(), part.decode())) for i, pool, parts in found for part in parts]
        engines = await self._store.run(*(("HGET", key, "engine") for _, key in looks)) if looks else []
        # One without a record is not on its queue yet, or its end is being posted: both are somebody else's to say.
        waiting = {i for (i, _), engine in zip(looks, engines, strict=True) if not engine}
        claimed = [i for i, _, _ in found if i not in waiting]
        if claimed:
            await self._store.run(("SREM", names.organization(organization_id) + name, *claimed))

    async def post(self, models: Iterable[str] | None = None) -> int:
        """Post what has ended; returns the number of entries that this call posted."""
        if models is None:
            (members,) = await self._store.run(("SMEMBERS", names.LEDGERS))
            models = [member.decode() for member in members]
        return await _each(self._post(model) for model in models)

    async def _post(self, model: str) -> int:
        ledger, number = keys.ledger(model), 0
        while True:
            (found,) = await self._store.run(("XRANGE", ledger, "-", "+", "COUNT", AT_ONCE))
            if not found:
                return number
            entries: dict[str, list[Entry]] = {}
            for entry_id, flat in found:
                name = asked_for(flat, model)
                entry = read_entry(name, entry_id, flat, await self.tariff(name, model))
                if entry is not None:
                    entries.setdefault(entry.organization, []).append(entry)
            number += await _each(self._post_what_can_be(o, model, own) for o, own in entries.items())
            milliseconds, _, place = found[-1][0].decode().partition("-")
            await self._store.run(("XTRIM", ledger, "MINID", f"{milliseconds}-{int(place) + 1}"))
            if len(found) < AT_ONCE:
                return number

    async def _post_what_can_be(self, organization_id: str, model: str, entries: Sequence[Entry]) -> int:
        """An entry that something stumbles over is passed over alone, whole in the log: it must not hold up all others
        for ever."""
        try:
            return await self._post_to(organization_id, model, entries)
        except (StoreFault, OverflowError, TypeError, ValueError) as error:  # after any other all of it is tried again
            if len(entries) == 1:
                log.error("an entry of a ledger cannot be posted", entry=entries[0].fields, reason=repr(error))
                return 0
        return sum([await self._post_what_can_be(organization_id, model, [entry]) for entry in entries])

    async def _post_to(self, organization_id: str, model: str, entries: Sequence[Entry]) -> int:
        watches = await self._watches(organization_id, entries)
        spec = (model, [e.packed() for e in entries], [w.packed() for w in watches], *self._lives)
        (reply,) = await self._store.run(POST(names.organization(organization_id), pack(spec)))
        for place in reply[1:]:
            watch = watches[int(place) - 1]
            log.warning("a budget is being used up", organization=organization_id, **watch.told())
        return int(reply[0])

    async def _watches(self, organization_id: str, entries: Sequence[Entry]) -> list[Watch]:
        wanted = ["organization", *{f"project/{e.project}" for e in entries}, *{f"key/{e.key}" for e in entries}]
        raw = await self._directory.fields(organization_id, *wanted)
        watches: list[Watch] = []
        for name, value in zip(wanted, raw, strict=True):
            try:
                watches += watches_of(name, value, time.time()) if value else []
            except ValueError as error:  # what was used is posted all the same
                log.error("a record of the directory cannot be read", record=name, reason=str(error))
        return watches

    async def sweep(self) -> int:
        """Give back what requests hold that were never put on a queue, or were lost with it; returns how many."""
        return await _each(self._sweep(organization_id) for organization_id in await self._directory.organization_ids())

    async def _sweep(self, organization_id: str) -> int:
        given = 0
        (due,) = await self._store.run(OVERDUE(names.organization(organization_id), HOLD_MS, AT_ONCE))
        for reservation, model, parts in due:
            gone = await self._gone(model.decode(), [part.decode() for part in parts])
            if gone:
                # What ended meanwhile is in the ledger since the very moment at which it was gone.
                await self.post([model.decode()])
                await self.withdraw(organization_id, reservation.decode(), gone)
                given += len(gone)
        return given

    async def _gone(self, model: str, parts: Sequence[str]) -> list[str]:
        there = await self._store.run(*(("EXISTS", keys.request(model, part)) for part in parts))
        return [part for part, exists in zip(parts, there, strict=True) if not exists]

    async def run(self) -> None:
        """Post and sweep until cancelled, whatever is raised."""
        sweep_at, away = 0.0, False
        while True:
            try:
                async with asyncio.timeout(EVERY * random.uniform(0.8, 1.2)):
                    await self._soon.wait()
                await asyncio.sleep(SOON)
            except TimeoutError:
                pass
            self._soon.clear()
            try:
                works: list[Callable[[], Awaitable[int]]] = [self.post]
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + 2 * EVERY
                    works.append(self.sweep)
                await _each(work() for work in works)
                away = False
            except BrokerUnavailable as error:
                if not away:
                    log.warning("the books cannot be kept: the store is away", reason=str(error))
                away = True
            except Exception:
                log.exception("the books cannot be kept")
                await asyncio.sleep(EVERY)


async def _each(works: Iterable[Awaitable[int]]) -> int:
    """Their sum. All of them are done, whatever one raises; only then is it raised. Without a store none goes on."""
    number, faults = 0, []
    for work in works:
        try:
            number += await work
        except BrokerUnavailable:
            raise
        except Exception as fault:
            faults.append(fault)
    if faults:
        raise faults[0] if len(faults) == 1 else ExceptionGroup("several of them", faults)
    return number
