"""The items of a conversation as the Responses API spells them: messages, calls and their outputs, reasoning.

What a text model cannot read is refused here by name. Knows no store and no template.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from noria.gateway.schemas.strict import FIRST_FAULT, Strict, at_most, only_kinds

MAX_ITEMS = 4096
"""Items in one request at most."""

_CONTENT = ("input_text", "output_text", "text", "refusal", "input_file", "reasoning_text", "summary_text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "compaction", "compaction_summary")

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(min_length=1, max_length=128)]


class InputTextPart(Strict):
    type: Literal["input_text", "text"]
    text: str


class OutputTextPart(Strict):
    """As an answer had it: annotations and log-probabilities come back with it and say nothing new."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], at_most(1024)] | None = None
    logprobs: list[Any] | None = None


class RefusalContent(Strict):
    type: Literal["refusal"]
    refusal: str


class FilePart(Strict):
    """A text file, in the request itself (`file_data`: base64, plain or as a data URL). Nothing is fetched."""

    type: Literal["input_file"]
    filename: str | None = Field(None, max_length=512)
    file_data: str | None = None
    file_id: str | None = Field(None, max_length=128)


class ThoughtPart(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


def _of_type(known: tuple[str, ...], what: str, why: str) -> BeforeValidator:
    message = f"{what} of type '{{kind}}' is not supported{why}"
    return only_kinds(*known, error="unsupported_item", message=message)


Part = Annotated[
    InputTextPart | OutputTextPart | RefusalContent | FilePart | ThoughtPart,
    Field(discriminator="type"),
    _of_type(_CONTENT, "content", ": this server's models read text only"),
]
Parts = Annotated[list[Part], FIRST_FAULT, at_most(1024)]


class MessageItem(Strict):
    """`phase` marks an assistant's message as comment or answer: it is kept, and no template asks for it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: ItemId
    name: str = Field(min_length=1, max_length=128)
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | Parts
    id: ItemId | None = None
    status: ItemStatus | None = None


class ReasoningItem(Strict):
    """Thoughts that an earlier answer showed, as its `content` or `summary`."""

    type: Literal["reasoning"]
    summary: Annotated[list[ThoughtPart], FIRST_FAULT, at_most(1024)] = Field(default=[])
    content: Annotated[list[ThoughtPart], FIRST_FAULT, at_most(1024)] | None = None
    encrypted_content: None = None
    id: ItemId | None = None
    status: ItemStatus | None = None


class CompactionItem(Strict):
    """What became of the turns before it."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: str
    id: ItemId | None = None


class ItemReference(Strict):
    type: Literal["item_reference"] = "item_reference"
    id: ItemId


def _with_type(value: Any) -> Any:
    """Messages and references may leave their type out."""
    if isinstance(value, dict) and value.get("type") is None:
        return {**value, "type": "message" if "role" in value else "item_reference"}
    return value


NewItem = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | CompactionItem,
    Field(discriminator="type"),
    _of_type(_ITEMS, "an item", ""),
    BeforeValidator(_with_type),
]
Item = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | CompactionItem | ItemReference,
    Field(discriminator="type"),
    _of_type((*_ITEMS, "item_reference"), "an item", ""),
    BeforeValidator(_with_type),
]
Items = Annotated[list[Item], FIRST_FAULT, at_most(MAX_ITEMS)]
