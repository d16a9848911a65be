"""The parts of tenancy of one gateway process, made once and held together.

Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from noria.engine.wire.connection import AsyncStore
from noria.gateway.errors import InvalidKey
from noria.gateway.tenancy.administration import Administration
from noria.gateway.tenancy.admission import Admission, Caller, Part
from noria.gateway.tenancy.books import Books
from noria.gateway.tenancy.credentials import Pepper
from noria.gateway.tenancy.directory import Directory
from noria.gateway.tenancy.principal import Principal
from noria.gateway.tenancy.resolver import WRONG_KEY, Resolver
from noria.gateway.tenancy.usage import Usage

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TenancyOptions:
    """`fail_open`: let requests in while their limits cannot be asked. Days are those that records are kept."""

    fail_open: bool = False
    ledger_days: int = 30
    usage_days: int = 400


class Tenancy:
    """Its own connections: a look-up never waits behind the queue's commands."""

    def __init__(
        self,
        redis_url: str,
        pepper: Pepper,
        options: TenancyOptions,
        unavailable: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._store = AsyncStore(redis_url)
        self._options = options
        self._unavailable = unavailable
        self.directory = Directory(self._store, pepper)
        self.administration = Administration(self.directory)
        self.usage = Usage(self._store)
        self.resolver = Resolver(self.directory)
        self.books = Books(self._store, self.directory, ledger_days=options.ledger_days, usage_days=options.usage_days)

    def caller(self, principal: Principal, key: str) -> Caller:
        async def again() -> Principal:
            found = await self.resolver.resolve(key, afresh=True)
            if not isinstance(found, Principal):
                raise InvalidKey(WRONG_KEY)
            return found

        return Caller(principal, again)

    async def caller_of(self, account: str) -> Caller:
        """For what a key has begun and this gateway goes on with. Raises `InvalidKey` where the key opens nothing any
        more, and BrokerUnavailable."""
        return Caller(await self.resolver.of_account(account), lambda: self.resolver.of_account(account))

    def admission(
        self, caller: Caller, model: str, pool: str, group: str, parts: Sequence[Part], *, in_batch: bool = False
    ) -> Admission:
        """`pool` is the model whose engines compute `model`: itself, or that of an adapter."""
        return Admission(
            self.books,
            caller,
            model,
            pool,
            group,
            parts,
            in_batch=in_batch,
            fail_open=self._options.fail_open,
            unavailable=self._unavailable,
        )

    async def run(self) -> None:
        """Keep the books until cancelled."""
        if not await self.directory.check_pepper():
            log.error("the keys in this store were made with another pepper: none of them opens anything here")
        await self.books.run()

    async def close(self) -> None:
        await self._store.close()
