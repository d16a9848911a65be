"""What an answer builds on: its own items, and before them those of the response or conversation that it goes on with.

Knows the shelves; no model and no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.gateway.errors import InvalidRequest, NotFound
from noria.gateway.files import Files
from noria.gateway.responses import ids
from noria.gateway.responses.conversations import ConversationShelf
from noria.gateway.responses.items import MAX_FILE_BYTES, GivenItem, given_items, shown
from noria.gateway.responses.parts import Shown
from noria.gateway.responses.stored import ResponseShelf, items_of
from noria.gateway.schemas.response_items import ItemReference
from noria.gateway.schemas.responses import InputFields


@dataclass(frozen=True, slots=True)
class Shelves:
    """Where a tenant's responses, conversations and files are."""

    responses: ResponseShelf
    conversations: ConversationShelf
    files: Files


@dataclass(frozen=True, slots=True)
class Context:
    """`chain` are the ids of the responses that `history` comes from. `own` are the request's items, as they came or,
    for references, as they are kept. `files` are the texts of the files that items name, by their ids."""

    chain: list[str]
    history: list[Shown]
    own: list[GivenItem | Shown]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def items(self) -> list[Shown]:
        """Everything that is said so far; the request's own items have no ids yet."""
        return [*self.history, *(item if isinstance(item, dict) else shown(item, "") for item in self.own)]

    def own_items(self, group: str) -> list[Shown]:
        """The request's items with the ids that they have as the input of one response."""
        return numbered(self.own, group)


def numbered(items: Sequence[GivenItem | Shown], group: str) -> list[Shown]:
    """Items with ids that belong to `group`; what has been kept before keeps its id."""
    return [
        item if isinstance(item, dict) else shown(item, ids.input_item(group, _kind(item), place))
        for place, item in enumerate(items)
    ]


async def gather(shelves: Shelves, tenant: str, request: InputFields) -> Context:
    """Raises `InvalidRequest` for what is not to be had, and `NotFound` for a conversation that is not."""
    chain: list[str] = []
    history: list[Shown] = []
    if request.previous_response_id is not None:
        chain, history = await shelves.responses.chain(tenant, request.previous_response_id)
    elif request.conversation is not None:
        history = await shelves.conversations.all_items(tenant, request.conversation.id)
    own: list[GivenItem | Shown] = []
    known = {item["id"] for item in history}
    for place, item in enumerate(given_items(request.input)):
        if not isinstance(item, ItemReference):
            own.append(item)
        elif item.id not in known:
            own.append(await _referred(shelves, tenant, item.id, f"input[{place}].id"))
    context = Context(chain, history, own)
    for file_id in _files_in(context.items):
        context.files[file_id] = await _file_text(shelves, tenant, file_id)
    return context


async def _referred(shelves: Shelves, tenant: str, item_id: str, param: str) -> Shown:
    """An item of a response that is kept. Those of the conversation are in the history anyway."""
    response_id = ids.response_of(item_id)
    if response_id is not None:
        try:
            for item in items_of(await shelves.responses.get(tenant, response_id)):
                if item["id"] == item_id:
                    return item
        except NotFound:
            pass
    raise InvalidRequest(f"Item with id '{item_id}' not found.", param=param, code="item_not_found")


def _files_in(items: Sequence[Shown]) -> list[str]:
    """The ids of the files that the items name, each once."""
    contents = [item.get("content", item.get("output")) for item in items]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return list(dict.fromkeys(part["file_id"] for part in parts if part.get("file_id")))


async def _file_text(shelves: Shelves, tenant: str, file_id: str) -> str:
    """Raises `InvalidRequest` for what is no text of bearable length, and `NotFound`."""
    file = await shelves.files.find(tenant, file_id, param="input")
    if file.size <= MAX_FILE_BYTES:
        try:
            return b"".join([piece async for piece in shelves.files.read(tenant, file_id)]).decode()
        except UnicodeDecodeError:
            pass
    message = f"The file '{file_id}' is no text in UTF-8 of {MAX_FILE_BYTES} bytes at most: it cannot be read."
    raise InvalidRequest(message, param="input", code="invalid_value")


def _kind(item: GivenItem) -> str:
    return "compaction" if item.type == "compaction_summary" else item.type
