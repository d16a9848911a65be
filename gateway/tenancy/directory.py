"""The directory of organisations, projects and keys in the store: read whole or by key, changed with an audit entry.

Knows how records lie in the store; not who may change them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson
import structlog

from noria.engine.wire.connection import AsyncStore, StoreFault, load_script
from noria.gateway.errors import Overloaded
from noria.gateway.tenancy import names
from noria.gateway.tenancy.credentials import Pepper
from noria.gateway.tenancy.records import AdminKey, ApiKey, ListedPrice, Organization, Price, Project, Record, Stored

CHANGE = load_script(Path(__file__).parent / "lua", "change")

AUDIT_LENGTH = 100_000
"""Entries that an organisation's audit log keeps (roughly)."""

DURABLE_WITHIN = 3.0
"""Seconds in which a store that can tell must have a change on disk."""

R = TypeVar("R", bound=Stored)
log = structlog.get_logger(__name__)


class Conflict(Overloaded):
    """The directory changed under every try."""


class NotDurable(Overloaded):
    """The change was made, but the store did not say in time that it is on disk."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who changes something: an admin key by its id, or `cli` with the name of the machine's user."""

    type: str
    id: str
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One organisation as it was at `version`. `raw` are the records as they are stored, by field."""

    id: str
    version: str
    raw: Mapping[str, bytes]

    @property
    def organization(self) -> Organization | None:
        return self.find(Organization, "organization")

    @property
    def projects(self) -> list[Project]:
        return self._all(Project, "project/")

    @property
    def keys(self) -> list[ApiKey]:
        return self._all(ApiKey, "key/")

    @property
    def admin_keys(self) -> list[AdminKey]:
        return self._all(AdminKey, "admin/")

    @property
    def prices(self) -> dict[str, Price]:
        found = [ListedPrice.model_validate_json(raw) for name, raw in self.raw.items() if name.startswith("price/")]
        return {listed.id: listed.price for listed in found}

    def find(self, kind: type[R], name: str) -> R | None:
        raw = self.raw.get(name)
        return None if raw is None else kind.model_validate_json(raw)

    def _all(self, kind: type[R], prefix: str) -> list[R]:
        found = [kind.model_validate_json(raw) for name, raw in self.raw.items() if name.startswith(prefix)]
        return sorted(found, key=lambda record: (record.created_at, record.id))


@dataclass(frozen=True, slots=True)
class Change:
    """What to write: records by field (None: take it away). `event` is the audit entry's type, `project` whose it is.
    `opened` and `closed` are digests that begin and cease to open something, as `kind/id`; the latter from a moment on
    (Unix seconds)."""

    event: str
    puts: Mapping[str, Record | None]
    project: str | None = None
    opened: Mapping[str, str] = field(default_factory=dict)
    closed: Mapping[str, float] = field(default_factory=dict)


class Directory:
    """One per process. All methods raise BrokerUnavailable."""

    def __init__(self, store: AsyncStore, pepper: Pepper) -> None:
        self.pepper = pepper
        self._store = store
        self._tells_durability: bool | None = None

    async def check_pepper(self) -> bool:
        """Whether the keys in this store were made with our pepper; the first who asks settles it."""
        ours = self.pepper.fingerprint
        _, known = await self._store.run(("SET", names.PEPPER, ours, "NX"), ("GET", names.PEPPER))
        return bool(known.decode() == ours)

    async def organization_ids(self) -> list[str]:
        (ids,) = await self._store.run(("SMEMBERS", names.ORGANIZATIONS))
        return sorted(i.decode() for i in ids)

    async def snapshot(self, organization_id: str) -> Snapshot:
        """All of one organisation, of which there may be nothing."""
        (flat,) = await self._store.run(("HGETALL", names.directory(organization_id)))
        raw = {name.decode(): bytes(value) for name, value in _pairs(flat)}
        version = raw.pop("version", b"0").decode()
        raw.pop("change", None)
        return Snapshot(organization_id, version, raw)

    async def owner(self, digest: str) -> tuple[str, str] | None:
        """The organisation and the field (`key/…`, `admin/…`) that a digest points to."""
        (pointer,) = await self._store.run(("GET", names.key(digest)))
        if pointer is None:
            return None
        organization_id, _, name = pointer.decode().partition("/")
        return organization_id, name

    async def fields(self, organization_id: str, *wanted: str) -> list[bytes | None]:
        (values,) = await self._store.run(("HMGET", names.directory(organization_id), *wanted))
        return list(values)

    async def change(self, organization_id: str, actor: Actor, step: Callable[[Snapshot], Change | None]) -> Snapshot:
        """Apply what `step` makes of the directory as it is (None: nothing); it may be asked again, if somebody else
        was quicker. Returns what it was before. Raises what `step` raises, Conflict and NotDurable."""
        name = secrets.token_hex(8)
        for _ in range(20):
            before = await self.snapshot(organization_id)
            change = step(before)
            if change is None:
                return before
            opened = [("SET", names.key(d), f"{organization_id}/{what}") for d, what in change.opened.items()]
            if opened:  # first: a pointer to what is not there opens nothing
                await self._store.run(*opened)
            if await self._write(organization_id, name, before, change, actor):
                closed = [("PEXPIREAT", names.key(d), int(at * 1000)) for d, at in change.closed.items()]
                if closed:
                    await self._store.run(*closed)
                return before
        raise Conflict("Others change this organization all the time. Please try again.")

    async def _write(self, organization_id: str, name: str, before: Snapshot, change: Change, actor: Actor) -> bool:
        puts = {field: b"" if record is None else record.model_dump_json() for field, record in change.puts.items()}
        entry = {
            "type": change.event,
            "effective_at": int(time.time()),
            "actor": {"type": actor.type, "id": actor.id, "address": actor.address},
            "project": change.project,
            "before": {field: _shown(before.raw.get(field)) for field in puts},
            "after": {field: _shown(value) for field, value in puts.items()},
        }
        flat = [part for pair in puts.items() for part in pair]
        command = CHANGE(
            names.organization(organization_id), name, before.version, orjson.dumps(entry), AUDIT_LENGTH, *flat
        )
        register = ("SADD", names.ORGANIZATIONS, organization_id)
        replies = await self._durably(command, register)
        return replies[0] is not None

    async def audit(self, organization_id: str, *, after: str | None, limit: int) -> list[tuple[str, dict[str, Any]]]:
        """Audit entries with their ids, the newest first, behind the entry `after`."""
        until = f"({after}" if after else "+"
        (found,) = await self._store.run(("XREVRANGE", names.audit(organization_id), until, "-", "COUNT", limit))
        return [(i.decode(), orjson.loads(dict(_pairs(fields))[b"entry"])) for i, fields in found]

    async def prices(self) -> dict[str, Price]:
        """The price list of the installation."""
        return (await self.snapshot(names.DEFAULT_ORGANIZATION)).prices

    async def price(self, model: str) -> Price | None:
        """What holds for this model."""
        wanted = (f"price/{model}", "price/*")
        own, rest = await self.fields(names.DEFAULT_ORGANIZATION, *wanted)
        raw = own or rest
        return None if raw is None else ListedPrice.model_validate_json(raw).price

    async def last_used(self, organization_id: str, key_ids: Sequence[str]) -> dict[str, int]:
        if not key_ids:
            return {}
        (values,) = await self._store.run(("HMGET", names.last_used(organization_id), *key_ids))
        return {key_id: int(value) for key_id, value in zip(key_ids, values, strict=True) if value is not None}

    async def _durably(self, *commands: Sequence[Any]) -> list[Any]:
        """Run them, and return once they are on disk, where the store can tell: Redis 7.2 with an append-only file."""
        if self._tells_durability is None:
            try:
                await self._store.run(("WAITAOF", 0, 0, 1), ("WAITAOF", 1, 0, 1))
                self._tells_durability = True
            except StoreFault:  # an older server, or one without the file
                self._tells_durability = False
                log.warning("the store cannot say when a change is on disk", wanted="Redis 7.2 with appendonly yes")
        if not self._tells_durability:
            return await self._store.run(*commands)
        async with asyncio.timeout(DURABLE_WITHIN + 1):
            *replies, synced = await self._store.run(*commands, ("WAITAOF", 1, 0, int(DURABLE_WITHIN * 1000)))
        if not synced[0]:
            raise NotDurable("The change is made, but the store did not say in time that it is on disk.")
        return replies


def _shown(raw: str | bytes | None) -> Any:
    """A record as the audit log has it: without what could help to guess a key."""
    if not raw:
        return None
    return {name: value for name, value in orjson.loads(raw).items() if name not in ("digest", "former")}


def _pairs(flat: Any) -> list[tuple[Any, Any]]:
    """The client makes a mapping of some replies and leaves others flat."""
    if isinstance(flat, dict):
        return list(flat.items())
    return list(zip(flat[::2], flat[1::2], strict=True))


def credential_of(name: str, raw: bytes) -> AdminKey | ApiKey:
    """The record of a field `key/…` or `admin/…`."""
    return AdminKey.model_validate_json(raw) if name.startswith("admin/") else ApiKey.model_validate_json(raw)
