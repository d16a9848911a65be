"""The parts of tenancy of one gateway process, made once and held together.

Knows no endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from noria.engine.wire.connection import AsyncStore
from noria.gateway.tenancy.administration import Administration
from noria.gateway.tenancy.credentials import Pepper
from noria.gateway.tenancy.directory import Directory
from noria.gateway.tenancy.principal import Principal
from noria.gateway.tenancy.resolver import Resolver


@dataclass(slots=True)
class Caller:
    """Who makes one HTTP request. `headers` is what its answer says of limits; filled when it is let in, or refused."""

    principal: Principal
    headers: dict[str, str] = field(default_factory=dict)


class Tenancy:
    """Its own connections: a look-up never waits behind the queue's commands."""

    def __init__(self, redis_url: str, pepper: Pepper) -> None:
        self._store = AsyncStore(redis_url)
        self.directory = Directory(self._store, pepper)
        self.administration = Administration(self.directory)
        self.resolver = Resolver(self.directory)

    def caller(self, principal: Principal) -> Caller:
        return Caller(principal)

    async def close(self) -> None:
        await self._store.close()
