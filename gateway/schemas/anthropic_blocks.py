"""Turns and content blocks as Anthropic's clients send them. Images and other documents than text are refused here by
name and never fetched. Knows no endpoint.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.strict import FIRST_FAULT, Strict, deeper_than, only_kinds
from noria.gateway.schemas.tools import MAX_DEPTH


class CacheControl(Strict):
    """The prefix cache needs no marks: it keeps what its memory holds."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class TextSource(Strict):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


_TEXT_SOURCE = only_kinds("text", error="source", message="a source of type '{kind}' is not supported: only text is")


class DocumentBlock(Strict):
    """A text with a name."""

    type: Literal["document"]
    source: Annotated[TextSource, _TEXT_SOURCE]
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


_TEXT_ONLY = only_kinds(
    "text", "document", error="block", message="content of type '{kind}' is not supported here: only text is"
)
ResultBlock = Annotated[TextBlock | DocumentBlock, Field(discriminator="type"), _TEXT_ONLY]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=128)
    content: str | Annotated[list[ResultBlock], FIRST_FAULT] | None = None
    is_error: bool = False
    cache_control: CacheControl | None = None


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=128)
    name: str = Field(min_length=1, max_length=128)
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None

    @field_validator("input")
    @classmethod
    def _flat_enough(cls, value: dict[str, Any]) -> dict[str, Any]:
        if deeper_than(value, MAX_DEPTH):
            raise PydanticCustomError("input", "it is nested more than {most} deep", {"most": MAX_DEPTH})
        return value


class ThinkingBlock(Strict):
    """Thoughts of this server carry an empty `signature`; whatever it is, it is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


_OF_USERS = only_kinds(
    "text",
    "document",
    "tool_result",
    error="block",
    message="content of type '{kind}' is not supported: only text and results of tools are",
)
UserBlock = Annotated[TextBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type"), _OF_USERS]
_OF_ASSISTANTS = only_kinds(
    "text",
    "thinking",
    "tool_use",
    error="block",
    message="content of type '{kind}' is not supported: only text, thoughts and uses of tools are",
)
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type"), _OF_ASSISTANTS]


class UserTurn(Strict):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], FIRST_FAULT]


class AssistantTurn(Strict):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], FIRST_FAULT]


class SystemTurn(Strict):
    role: Literal["system"]
    content: str | Annotated[list[TextBlock], FIRST_FAULT]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]
