"""Conversations in the store: a record each, and their items as records of their own.

Knows records; no text, no queue and no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

import orjson

from noria.engine.wire.record_store import RecordStore
from noria.gateway.errors import InvalidRequest, NotFound
from noria.gateway.records import CONVERSATION, ITEM
from noria.gateway.responses import ids
from noria.gateway.responses.parts import Shown

MAX_ITEMS_IN_CONTEXT = 4096
"""Items of a conversation that an answer may have before it at most."""

_PAGE = 256


class ConversationShelf:
    """One per gateway. A conversation and all its items live `ttl` seconds from their last use. All methods raise
    BrokerUnavailable, and `NotFound` for a conversation or an item that is not there."""

    def __init__(self, records: RecordStore, ttl: float) -> None:
        self._records = records
        self._ttl = ttl

    async def create(self, tenant: str, metadata: Mapping[str, str], items: Sequence[Shown]) -> Shown:
        """Raises RecordsFull."""
        made = {
            "id": ids.CONVERSATION + secrets.token_hex(24),
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": dict(metadata),
        }
        await self._write(tenant, made)
        await self._append(tenant, str(made["id"]), items)
        return made

    async def get(self, tenant: str, conversation_id: str) -> Shown:
        found = None
        if ids.could_be(conversation_id):
            found = await self._records.get(tenant, CONVERSATION, conversation_id)
        if found is None:
            raise NotFound(f"Conversation with id '{conversation_id[:128]}' not found.")
        return orjson.loads(found.body)  # type: ignore[no-any-return]

    async def update(self, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> Shown:
        changed = {**await self.get(tenant, conversation_id), "metadata": dict(metadata)}
        await self._write(tenant, changed)
        return changed

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Its items go with it."""
        await self.get(tenant, conversation_id)
        await self._records.delete(tenant, CONVERSATION, conversation_id)
        await self._records.clear(tenant, _items(conversation_id))

    async def append(self, tenant: str, conversation_id: str, items: Sequence[Shown]) -> None:
        """Items that are there already are passed over. Raises RecordsFull."""
        await self.get(tenant, conversation_id)
        await self._append(tenant, conversation_id, items)

    async def page(
        self, tenant: str, conversation_id: str, *, after: str | None, limit: int, descending: bool
    ) -> tuple[list[Shown], bool]:
        """Raises `InvalidRequest` for an `after` that is none of its items."""
        await self.get(tenant, conversation_id)
        try:
            found, more = await self._records.page(
                tenant, _items(conversation_id), after=after, limit=limit, descending=descending
            )
        except KeyError:
            raise InvalidRequest(f"No item with id '{(after or '')[:128]}' found.", param="after") from None
        return [orjson.loads(record.body) for record in found], more

    async def all_items(self, tenant: str, conversation_id: str) -> list[Shown]:
        """Raises `InvalidRequest` where there are too many to have them all before an answer."""
        items: list[Shown] = []
        after, more = None, True
        while more:
            page, more = await self.page(tenant, conversation_id, after=after, limit=_PAGE, descending=False)
            items += page
            after = page[-1]["id"] if page else None
            if len(items) > MAX_ITEMS_IN_CONTEXT:
                message = (
                    f"The conversation has more than {MAX_ITEMS_IN_CONTEXT} items: an answer cannot build on them."
                )
                raise InvalidRequest(message, param="conversation")
        return items

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> Shown:
        await self.get(tenant, conversation_id)
        found = await self._records.get(tenant, _items(conversation_id), item_id) if ids.could_be(item_id) else None
        if found is None:
            raise _no_item(item_id)
        return orjson.loads(found.body)  # type: ignore[no-any-return]

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> Shown:
        """Returns the conversation."""
        conversation = await self.get(tenant, conversation_id)
        if not ids.could_be(item_id) or not await self._records.delete(tenant, _items(conversation_id), item_id):
            raise _no_item(item_id)
        return conversation

    async def _append(self, tenant: str, conversation_id: str, items: Sequence[Shown]) -> None:
        kind, began = _items(conversation_id), time.time() * 1000
        for place, item in enumerate(items):
            created = began + place / 1000  # milliseconds, and the order within them
            await self._records.put(
                tenant, kind, item["id"], orjson.dumps(item), created=created, ttl=self._ttl, new=True
            )
        await self._records.touch(tenant, kind, None, ttl=self._ttl)
        await self._records.touch(tenant, CONVERSATION, [conversation_id], ttl=self._ttl)

    async def _write(self, tenant: str, conversation: Shown) -> None:
        body, created = orjson.dumps(conversation), conversation["created_at"]
        await self._records.put(tenant, CONVERSATION, conversation["id"], body, created=created, ttl=self._ttl)


def _items(conversation_id: str) -> str:
    return f"{ITEM}/{conversation_id}"


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"Item with id '{item_id[:128]}' not found.")
