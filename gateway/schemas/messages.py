"""Messages of a conversation as clients send them, and as plain data for a chat template.

Images, audio and files are refused here by name and never fetched. Knows no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from noria.gateway.schemas.strict import FIRST_FAULT, Strict, at_most, only_kinds


class TextPart(Strict):
    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


_TEXT_ONLY = only_kinds(
    "text", "refusal", error="content_part", message="content of type '{kind}' is not supported: only text is"
)
Part = Annotated[TextPart | RefusalPart, Field(discriminator="type"), _TEXT_ONLY]
Content = str | Annotated[list[Part], FIRST_FAULT]


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str = Field(min_length=1)
    type: Literal["function"]
    function: FunctionCall


class SystemMessage(Strict):
    role: Literal["system"]
    content: Content
    name: str | None = None


class DeveloperMessage(Strict):
    role: Literal["developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """`content` may be empty or null, as the API allows beside tool calls and as histories in the wild have it."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_FAULT] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Annotated[list[Any], at_most(0)] | None = None
    audio: None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


class FunctionMessage(Strict):
    role: Literal["function"]
    content: Content | None = None
    name: str


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]


def plain_text(content: Content | None) -> str:
    """The text of all parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def size_beside_text(message: Message) -> int:
    """Characters that a message has beside its content."""
    if not isinstance(message, AssistantMessage):
        return 0
    texts = (message.reasoning_content, message.reasoning, message.refusal)
    return sum(len(call.function.arguments) for call in message.tool_calls or ()) + sum(len(t or "") for t in texts)


def template_turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain data for a chat template, those of the older functions as calls and results."""
    turns: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        turn = message.model_dump(exclude_none=True)
        if isinstance(message, FunctionMessage):
            turn |= {"role": "tool", "tool_call_id": f"call_{place - 1}"}
        elif isinstance(message, AssistantMessage):
            _modernise(turn, place)
        turns.append(turn)
    return turns


def _modernise(turn: dict[str, Any], place: int) -> None:
    if (function := turn.pop("function_call", None)) is not None:
        turn["tool_calls"] = [{"id": f"call_{place}", "type": "function", "function": function}]
    if (refusal := turn.pop("refusal", None)) is not None and not turn.get("content"):
        turn["content"] = refusal
    thought = turn.pop("reasoning", None) or turn.get("reasoning_content")
    if thought:
        turn["reasoning_content"] = turn["thinking"] = thought  # templates call it one or the other
