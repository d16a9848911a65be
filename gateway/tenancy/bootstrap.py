"""The first admin key of an installation: made where there is none, told once, kept nowhere.

Knows the store and the directory; who prints the key is not its concern.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from noria.engine.wire.connection import AsyncStore
from noria.gateway.tenancy.administration import Administration, Refused
from noria.gateway.tenancy.credentials import Pepper
from noria.gateway.tenancy.directory import Actor, Directory
from noria.gateway.tenancy.names import DEFAULT_ORGANIZATION

DEFAULT_PROJECT = "proj_default"


class WrongPepper(Exception):
    """The keys in this store were made with another pepper."""


async def bootstrap(redis_url: str, pepper: str, *, force: bool = False, actor: Actor | None = None) -> str | None:
    """The value of a new admin key for the whole installation, where there is none yet or with `force`; else None. The
    organisation and project `default` are made with the first. Raises WrongPepper, BrokerUnavailable and ValueError."""
    async with opened(redis_url, pepper) as administration:
        if not force and await _has_admin(administration):
            return None
        return await _first_key(administration, actor or Actor("cli", "bootstrap"))


async def has_admin(redis_url: str, pepper: str) -> bool:
    """Whether there is an admin key for the whole installation. Raises as `bootstrap`."""
    async with opened(redis_url, pepper) as administration:
        return await _has_admin(administration)


@asynccontextmanager
async def opened(redis_url: str, pepper: str) -> AsyncIterator[Administration]:
    """An administration with a connection of its own. Raises as `bootstrap`."""
    store = AsyncStore(redis_url)
    try:
        directory = Directory(store, Pepper(pepper))
        if not await directory.check_pepper():
            raise WrongPepper("the keys in this store were made with another pepper")
        yield Administration(directory)
    finally:
        await store.close()


async def _has_admin(administration: Administration) -> bool:
    for organization in await administration.organizations():
        snapshot = await administration.directory.snapshot(organization.id)
        if any(key.scope == "instance" for key in snapshot.admin_keys):
            return True
    return False


async def _first_key(administration: Administration, actor: Actor) -> str:
    with suppress(Refused):  # they are there
        await administration.create_organization(actor, {"name": "default"}, id=DEFAULT_ORGANIZATION)
        await administration.create_project(actor, DEFAULT_ORGANIZATION, {"name": "default"}, id=DEFAULT_PROJECT)
    given = {"name": "first administrator", "scope": "instance"}
    _, secret = await administration.create_admin_key(actor, DEFAULT_ORGANIZATION, given)
    return secret.value
