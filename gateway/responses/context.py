"""What an answer builds on: its own items, and before them those of the response or conversation that it goes on with.

Knows the shelves; no model and no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noria.gateway.errors import InvalidRequest, NotFound, UnsupportedParameter
from noria.gateway.responses import ids
from noria.gateway.responses.conversations import ConversationShelf
from noria.gateway.responses.items import GivenItem, given_items, shown
from noria.gateway.responses.parts import Shown
from noria.gateway.responses.stored import ResponseShelf, items_of
from noria.gateway.schemas.response_items import FilePart, FunctionOutputItem, ItemReference, MessageItem
from noria.gateway.schemas.responses import InputFields


@dataclass(frozen=True, slots=True)
class Shelves:
    """Where a tenant's responses and conversations are."""

    responses: ResponseShelf
    conversations: ConversationShelf


@dataclass(frozen=True, slots=True)
class Context:
    """`chain` are the ids of the responses that `history` comes from. `own` are the request's items, as they came or,
    for references, as they are kept."""

    chain: list[str]
    history: list[Shown]
    own: list[GivenItem | Shown]

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
        _refuse_uploads(item, place)
        if not isinstance(item, ItemReference):
            own.append(item)
        elif item.id not in known:
            own.append(await _referred(shelves, tenant, item.id, f"input[{place}].id"))
    return Context(chain, history, own)


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


def _refuse_uploads(item: GivenItem, place: int) -> None:
    content = item.content if isinstance(item, MessageItem) else None
    if isinstance(item, FunctionOutputItem):
        content = item.output
    for part in content if isinstance(content, list) else ():
        if isinstance(part, FilePart) and part.file_id is not None:
            param = f"input[{place}].content.file_id"
            message = "Unsupported parameter: 'file_id' is not supported by this server: send the text as 'file_data'."
            raise UnsupportedParameter(message, param=param)


def _kind(item: GivenItem) -> str:
    return "compaction" if item.type == "compaction_summary" else item.type
