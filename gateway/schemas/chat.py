"""The request of POST /v1/chat/completions: messages of text, and what may be asked of the answer.

Images, audio and files are refused here by name and never fetched. Knows no template.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.metadata import Metadata
from noria.gateway.schemas.sampling import MAX_LOGPROBS, REFUSED, SamplingFields, combination
from noria.gateway.schemas.strict import FIRST_FAULT, Strict, at_most

_RESERVED_KWARGS = frozenset(
    ("chat_template", "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")
)


INLINE_BYTES = 20_000
"""Texts up to this long are encoded on the event loop (under 10 ms); longer ones beside it."""

MAX_KWARGS_BYTES = 16 * 1024
"""Of `chat_template_kwargs` as JSON: switches for a template, not texts."""


class TextPart(Strict):
    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


def _text_only(part: Any) -> Any:
    """Name the kind of a part that is no text, instead of listing every field in it that we do not know."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        known = {"kind": kind[:64], "param_suffix": "type"}
        raise PydanticCustomError("content_part", "content of type '{kind}' is not supported: only text is", known)
    return part


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type"), BeforeValidator(_text_only)]
Content = str | Annotated[list[Part], FIRST_FAULT]


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
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


class TextFormat(Strict):
    type: Literal["text"]


class ChatRequest(SamplingFields):
    """A chat completion as asked for. `max_completion_tokens` is the newer name of `max_tokens`."""

    refused: ClassVar = REFUSED | {
        "prompt_logprobs": "is not supported for chat completions",
        "return_token_ids": "is not supported for chat completions",
        "tools": "is not supported by this server", "tool_choice": "is only allowed when 'tools' are specified",
        "parallel_tool_calls": "is only allowed when 'tools' are specified",
        "functions": "is not supported by this server", "function_call": "is not supported by this server",
        "audio": "is not supported: answers are text", "web_search_options": "is not supported by this server",
        "prediction": "is not supported by this server", "moderation": "is not supported by this server",
        "best_of": "is not a parameter of chat completions", "echo": "is not supported for chat completions",
        "prompt_cache_options": "is not supported by this server",
        "prompt_cache_retention": "is not supported by this server", "documents": "is not supported by this server",
    }  # fmt: skip

    messages: Annotated[list[Message], FIRST_FAULT] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], at_most(4)] = Field(default=["text"], min_length=1)
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    store: bool = False
    metadata: Metadata = Field(default={})
    prompt_cache_key: str | None = Field(None, max_length=4096)
    safety_identifier: str | None = Field(None, max_length=4096)

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], at_most(64)] = Field(default={})

    @field_validator("chat_template_kwargs")
    @classmethod
    def _small(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            small = len(orjson.dumps(value)) <= MAX_KWARGS_BYTES
        except orjson.JSONEncodeError:  # nested more than 254 levels deep
            small = False
        if not small:
            message = "they are nested too deep or have more than {most} bytes of JSON"
            raise PydanticCustomError("chat_template_kwargs", message, {"most": MAX_KWARGS_BYTES})
        return value

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise combination("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true")
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise combination("max_tokens", "'max_tokens' and 'max_completion_tokens' may not be set to two values")
        if self.continue_final_message and self.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
            raise combination("continue_final_message", message)
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "'continue_final_message' needs a last message of the role 'assistant'"
            raise combination("continue_final_message", message)
        for name in self.chat_template_kwargs:
            if name in _RESERVED_KWARGS:
                param = f"chat_template_kwargs.{name}"
                raise combination(param, f"'{param}' is refused: it is set by the request itself or by the model")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all content, in which a template may add but from which it takes little away."""
        return sum(_text_bytes(message.content) for message in self.messages)

    @property
    def is_large(self) -> bool:
        """Whether rendering and encoding take long enough to be done beside the event loop."""
        beside = sum(_bytes_beside(message) for message in self.messages if isinstance(message, AssistantMessage))
        return self.text_bytes + beside + 100 * len(self.messages) > INLINE_BYTES

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as plain data for a chat template."""
        return [message.model_dump(exclude_none=True) for message in self.messages]


def _bytes_beside(message: AssistantMessage) -> int:
    calls = sum(len(call.function.arguments) for call in message.tool_calls or ())
    return calls + len(message.reasoning_content or "") + len(message.refusal or "")


def _text_bytes(content: Content | None) -> int:
    if isinstance(content, str):
        return len(content.encode())
    return sum(len((part.text if isinstance(part, TextPart) else part.refusal).encode()) for part in content or ())
