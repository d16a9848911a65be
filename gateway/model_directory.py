"""The models that this gateway can offer: cards, tokenizers and templates as engines published them.

Keeps a snapshot of the pools' state for readiness and metrics. Knows no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from noria.engine.wire.broker import BrokerUnavailable, GatewayBroker, ModelStatus, StoreFault
from noria.engine.wire.messages import ModelCard, TokenizerFiles
from noria.engine.wire.token_bytes import UnsupportedTokenizer
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.errors import STORE_AWAY, ModelNotFound, Overloaded
from noria.gateway.text.chat_template import ChatTemplate, TemplateError

log = structlog.get_logger(__name__)

_LOOK_TIME = 2.0
"""Seconds for a look at the store: new requests are refused at once when it failed, so it must fail soon."""

NO_ENGINE = "No engine serves this model at the moment. Please try again."


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request needs of its model. `longest_token` is in bytes of UTF-8: a text of more than
    `longest_token * n` bytes has more than n tokens. `template` is None for a model without a chat template."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    longest_token: int


@dataclass(frozen=True, slots=True)
class _Tables:
    """What is made of a tokenizer's files, in about a second. `digest` is theirs."""

    digest: bytes
    making: asyncio.Task[tuple[Tokenizer, int]]  # the tokenizer, and its longest token


class ModelDirectory:
    """`models` is the last snapshot by id; `fresh` tells whether the store answered the last look."""

    def __init__(self, broker: GatewayBroker) -> None:
        self._broker = broker
        self._served: dict[str, ServedModel] = {}
        self._looking = asyncio.Lock()
        self._making: dict[str, asyncio.Task[ServedModel]] = {}
        self._tables: dict[str, _Tables] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._model_by_alias: Mapping[str, str] = {}
        self.models: dict[str, ModelStatus] = {}
        self.fresh = False
        self.trouble = "no contact with the store yet"

    def rename(self, model_by_alias: Mapping[str, str]) -> None:
        """From the next look on models have these names too, which win over the aliases that engines give."""
        self._model_by_alias = model_by_alias

    async def refresh(self) -> None:
        """Take in what the broker knows, which is a second old at most. Never raises: see `fresh`."""
        async with self._looking:
            try:
                async with asyncio.timeout(_LOOK_TIME):
                    found = {status.card.id: self._renamed(status) for status in await self._broker.models()}
                for status in found.values():
                    await self._load(status)
            except (BrokerUnavailable, StoreFault) as error:
                self.fresh, self.trouble = False, str(error)
            except TimeoutError:
                self.fresh, self.trouble = False, "the store does not answer in time"
            else:
                self.models, self.fresh, self.trouble = found, True, ""
                self._served = {name: model for name, model in self._served.items() if name in found}
                self._prepare(self._broker.announced())
                self._tables = {n: t for n, t in self._tables.items() if n in found or n in self._preparing}

    async def resolve(self, name: str) -> ServedModel:
        """The model of that name or alias, live or not. Raises `ModelNotFound`, or `Overloaded` while nothing is known
        of it but its name."""
        status = self.find(name)
        if status is None or not status.takes_requests:
            await self.refresh()
            status = self.find(name)
        if status is None:
            if not self.fresh:
                raise Overloaded(STORE_AWAY, retry_after=2)
            if not self.models:  # the first engine is still loading: a client should try again, not give up
                raise Overloaded("No engine serves a model yet. Please try again.", retry_after=2)
            raise not_found(name)
        model = self._served.get(status.card.pool)
        if model is None:
            raise Overloaded(NO_ENGINE, retry_after=2)
        return model if status.card.adapter is None else dataclasses.replace(model, card=status.card)

    def require_live(self, model: ServedModel) -> None:
        """Raises `Overloaded` where a new request would find no engine that claims it, or no store."""
        if not self.fresh:
            raise Overloaded(STORE_AWAY, retry_after=2)
        status = self.models.get(model.card.pool)
        if status is None or not status.takes_requests:
            raise Overloaded(NO_ENGINE, retry_after=2)

    def find(self, name: str) -> ModelStatus | None:
        """The state of a model by id or alias, or by the name of an adapter, live or not. An adapter's is that of its
        model, with a card of its own; where a name is both, it is the model's."""
        if name in self.models:
            return self.models[name]
        named = [status for status in self.models.values() if name in status.card.aliases]
        if not named:
            named = [_adapted(status, name) for status in self.models.values() if name in status.adapters]
        # An alias may move from one pool to another: one that takes requests serves, and of several the oldest.
        return min(named, key=lambda s: (not s.takes_requests, s.card.created, s.card.pool), default=None)

    def models_now(self) -> list[ModelStatus]:
        """The last snapshot."""
        return list(self.models.values())

    def names(self) -> list[str]:
        """Of all models, and of their adapters."""
        return [name for status in self.models.values() for name in (status.card.id, *status.adapters)]

    def live(self) -> list[ModelStatus]:
        """Models that a new request can use, oldest first: an engine claims, its tokenizer is known."""
        ready = [s for s in self.models.values() if s.takes_requests and s.card.id in self._served]
        return sorted(ready, key=lambda status: (status.card.created, status.card.id))

    def _renamed(self, status: ModelStatus) -> ModelStatus:
        own = self._model_by_alias
        theirs = [alias for alias in status.card.aliases if alias not in own]
        ours = [alias for alias, model in own.items() if model in (status.card.id, *status.card.aliases)]
        card = msgspec.structs.replace(status.card, aliases=(*theirs, *ours))
        return dataclasses.replace(status, card=card)

    async def _load(self, status: ModelStatus) -> None:
        known = self._served.get(status.card.id)
        if known is not None and _nameless(known.card) == _nameless(status.card):
            self._served[status.card.id] = dataclasses.replace(known, card=status.card)
            return
        if not status.engines and known is not None:
            return
        # A probe may give up waiting: what was begun goes on, and whoever comes next waits for the same.
        making = self._making.get(status.card.id)
        if making is None:
            making = self._making[status.card.id] = asyncio.create_task(self._make(status.card))
        try:
            model = await asyncio.shield(making)
        except (UnsupportedTokenizer, KeyError) as error:
            log.error("tokenizer of a model is not usable", model=status.card.id, error=str(error))
            return
        finally:
            if making.done():
                del self._making[status.card.id]
        self._served[status.card.id] = model
        await asyncio.to_thread(_give_memory_back)
        log.info("model known", model=status.card.id, tokenizer=model.tokenizer.backend)

    async def _make(self, card: ModelCard) -> ServedModel:
        files = await self._broker.tokenizer(card.id)
        tokenizer, longest = await self._tables_of(card.id, files)
        return ServedModel(card, tokenizer, await asyncio.to_thread(_template, card, files), longest)

    def _prepare(self, announced: Sequence[str]) -> None:
        """Make the tables of models that are still loading: they take as long."""
        self._preparing = {
            name: self._preparing.get(name) or asyncio.create_task(self._prepare_one(name)) for name in announced
        }

    async def _prepare_one(self, name: str) -> None:
        # What is wrong is told once the model is there.
        with contextlib.suppress(UnsupportedTokenizer, KeyError, BrokerUnavailable, StoreFault):
            await self._tables_of(name, await self._broker.tokenizer(name))

    async def _tables_of(self, name: str, files: TokenizerFiles) -> tuple[Tokenizer, int]:
        digest = hashlib.sha256(msgspec.msgpack.encode(files)).digest()
        known = self._tables.get(name)
        if known is None or known.digest != digest or _has_failed(known.making):
            making = asyncio.create_task(asyncio.to_thread(_made_tables, files))
            known = self._tables[name] = _Tables(digest, making)
        return await asyncio.shield(known.making)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _nameless(card: ModelCard) -> ModelCard:
    """Other names change no table that is made for a model."""
    return msgspec.structs.replace(card, aliases=())


def _adapted(status: ModelStatus, name: str) -> ModelStatus:
    """The model's state as that of one of its adapters."""
    listed, card = status.adapters[name], status.card
    own = msgspec.structs.replace(
        card,
        id=name,
        aliases=(),
        created=listed.created,
        fingerprint=f"{card.fingerprint}_{listed.ref.digest[:8]}",
        takes_adapters=False,
        adapter=listed.ref,
        base=card.id,
    )
    return dataclasses.replace(status, card=own, adapters={})


def not_found(name: str) -> ModelNotFound:
    shown = name if len(name) <= 128 else name[:125] + "..."
    known = "GET /v1/models lists those that do."
    return ModelNotFound(f"The model '{shown}' does not exist or you do not have access to it. {known}", param="model")


def _template(card: ModelCard, files: TokenizerFiles) -> ChatTemplate | None:
    if not files.chat_template:
        return None
    try:
        return ChatTemplate(files, describe_tools=card.tool_parser in ("auto", "hermes"))
    except TemplateError as error:
        log.error("chat template not usable; completions are", model=card.id, error=str(error))
        return None


def _made_tables(files: TokenizerFiles) -> tuple[Tokenizer, int]:
    tokenizer = Tokenizer.load(files)
    longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
    spelled = max((len(name.encode()) for name in tokenizer.control_tokens), default=1)
    return tokenizer, max(longest, spelled, 1)


def _give_memory_back() -> None:
    """A model's tables were made from several times their size, which the allocator would keep for this process."""
    with contextlib.suppress(OSError, AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
