"""Adapters taken in and put out while the server runs: what an operator may ask for, and when it is done everywhere.

Knows the pool's list and what engines say; no HTTP, and not what an adapter computes.
"""

from __future__ import annotations

import asyncio
import secrets
import time

import msgspec

from noria.engine.wire.adapters import LOAD_TIME, MAX_ADAPTERS, GatewayAdapterLists, ListedAdapter, check_name, staged
from noria.engine.wire.broker import GatewayBroker, ModelStatus
from noria.engine.wire.messages import AdapterRef
from noria.engine.wire.pool_status import FRESH_FOR
from noria.gateway.errors import DeadlineExpired, InvalidRequest, NotFound, Overloaded, WrongState
from noria.gateway.model_directory import NO_ENGINE, ModelDirectory

_LOOK_EVERY = 0.1
"""Seconds between two looks at what engines say."""


class AdapterOffice:
    """Methods raise a `GatewayError` and BrokerUnavailable."""

    def __init__(self, broker: GatewayBroker, directory: ModelDirectory) -> None:
        self._broker = broker
        self._lists: GatewayAdapterLists = broker.adapters
        self._directory = directory

    async def load(self, name: str, path: str, base: str | None, *, in_place: bool) -> None:
        """Let every engine of the model load the adapter in `path`, then offer it under `name`. Other gateways know it
        when this returns. `in_place`: it may take the place of another of the name, which ends what it has begun."""
        status = await self._pool(base)
        pool = status.card.id
        await self._check(name, path, status, in_place=in_place)
        entry = ListedAdapter(AdapterRef(name, path, ""), int(time.time()), secrets.token_hex(8))
        if not await self._lists.stage(pool, entry):
            raise WrongState(f"The adapter '{name}' is being loaded already.")
        try:
            await self._check_number(pool)
            digest = await self._digest(pool, entry)
            ready = msgspec.structs.replace(entry, ref=AdapterRef(name, path, digest))
            await self._lists.confirm(pool, ready)
        finally:
            await self._lists.take_off(pool, staged(name))
        await self._look_again()
        await asyncio.sleep(FRESH_FOR)  # as old as other gateways' picture may be

    async def unload(self, name: str, base: str | None) -> None:
        """New requests for it find nothing from now on; at other gateways within two seconds. What runs or waits ends
        as ever."""
        pools = [s for s in await self._statuses() if name in s.adapters and base in (None, s.card.id, *s.card.aliases)]
        if not pools:
            raise NotFound(f"The adapter '{name[:128]}' is not loaded.", param="lora_name")
        for status in pools:
            await self._lists.take_off(status.card.id, name)
        await self._look_again()

    async def _statuses(self) -> list[ModelStatus]:
        await self._look_again()
        return self._directory.models_now()

    async def _look_again(self) -> None:
        self._broker.look_again()
        await self._directory.refresh()

    async def _pool(self, base: str | None) -> ModelStatus:
        """The model whose engines are to load it: the only one where none is named."""
        statuses = await self._statuses()
        if base is None:
            statuses = [status for status in statuses if status.takes_requests] or statuses
            if len(statuses) != 1:
                message = f"Missing required parameter: 'base_model_name': {len(statuses)} models are served."
                raise InvalidRequest(message, param="base_model_name", code="missing_required_parameter")
            return statuses[0]
        for status in statuses:
            if base in (status.card.id, *status.card.aliases):
                return status
        raise InvalidRequest(f"The model '{base[:128]}' is not served.", param="base_model_name")

    async def _check(self, name: str, path: str, status: ModelStatus, *, in_place: bool) -> None:
        try:
            check_name(name)
        except ValueError as error:
            raise InvalidRequest(f"Invalid 'lora_name': {error}.", param="lora_name") from None
        if not path.startswith("/") or "\0" in path:
            raise InvalidRequest("Invalid 'lora_path': give a whole path, as engines see it.", param="lora_path")
        if not status.card.takes_adapters:
            message = f"The model '{status.card.id}' takes no adapters: they need layers of our own, on one rank."
            raise InvalidRequest(message, param="base_model_name")
        taken = self._directory.find(name)
        if taken is not None and not (in_place and name in status.adapters and taken.card.base == status.card.id):
            what = "an adapter that is loaded already" if taken.card.adapter else "a model"
            raise InvalidRequest(f"Invalid 'lora_name': '{name}' is the name of {what}.", param="lora_name")

    async def _check_number(self, pool: str) -> None:
        """With those that are being loaded, the new one among them: of several at once each sees the others."""
        names = {name.removeprefix(staged("")) for name in await self._lists.listed(pool)}
        if len(names) > MAX_ADAPTERS:
            raise InvalidRequest(f"A model has {MAX_ADAPTERS} adapters at most: unload one first.", param="lora_name")

    async def _digest(self, pool: str, entry: ListedAdapter) -> str:
        """Of the adapter's files, once every engine has read them."""
        try:
            async with asyncio.timeout(LOAD_TIME):
                while True:
                    digest = await self._agreed(pool, entry)
                    if digest is not None:
                        return digest
                    await asyncio.sleep(_LOOK_EVERY)
        except TimeoutError:
            message = f"Not every engine has loaded the adapter within {LOAD_TIME:g} seconds."
            raise DeadlineExpired(message) from None

    async def _agreed(self, pool: str, entry: ListedAdapter) -> str | None:
        """None: some engine has not said its word yet."""
        statuses = {status.card.id: status for status in await self._broker.models()}
        found = statuses.get(pool)
        engines = [] if found is None else [i for i, stats in found.engines.items() if not stats.draining]
        if not engines:
            raise Overloaded(NO_ENGINE, retry_after=2)
        reports = [reports.get(staged(entry.ref.name)) for reports in await self._lists.reports(pool, engines)]
        own = [report for report in reports if report is not None and report.mark == entry.mark]
        for report in own:
            if report.error:
                raise InvalidRequest(f"The adapter cannot be loaded: {report.error}", param="lora_path")
        digests = {report.digest for report in own}
        if len(digests) > 1:
            raise InvalidRequest("Engines find different files in this path.", param="lora_path")
        return digests.pop() if len(own) == len(engines) else None
