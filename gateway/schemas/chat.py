"""The request of POST /v1/chat/completions: messages of text, and what may be asked of the answer.

Images, audio and files are refused here by name and never fetched. Knows no template.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.messages import Content, Message, plain_text, size_beside_text, template_turns
from noria.gateway.schemas.metadata import Metadata
from noria.gateway.schemas.platform import Moderation, PromptCacheOptions
from noria.gateway.schemas.sampling import MAX_LOGPROBS, REFUSED, SamplingFields, combination
from noria.gateway.schemas.strict import FIRST_FAULT, Strict, at_most
from noria.gateway.schemas.tools import (
    FunctionChoice,
    FunctionList,
    Mismatch,
    ToolChoice,
    ToolList,
    chosen_functions,
    chosen_tools,
)
from noria.gateway.tools import Tools

_RESERVED_KWARGS = frozenset(
    ("chat_template", "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")
)
INLINE_BYTES = 20_000
"""Texts up to this long are encoded on the event loop (under 10 ms); longer ones beside it."""

MAX_KWARGS_BYTES = 16 * 1024
"""Of `chat_template_kwargs` as JSON: switches for a template, not texts."""


class Prediction(Strict):
    """What much of the answer will be, as the client believes."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return plain_text(self.content)


class ChatRequest(SamplingFields):
    """A chat completion as asked for. `max_completion_tokens` is the newer name of `max_tokens`."""

    refused: ClassVar = REFUSED | {
        "audio": "is not supported: answers are text", "web_search_options": "is not supported by this server",
        "best_of": "is not a parameter of chat completions", "echo": "is not supported for chat completions",
        "documents": "is not supported by this server",
    }  # fmt: skip

    messages: Annotated[list[Message], FIRST_FAULT] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    modalities: Annotated[list[Literal["text"]], at_most(4)] = Field(default=["text"], min_length=1)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    store: bool = False
    metadata: Metadata = Field(default={})
    prediction: Prediction | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    prompt_cache_key: str | None = Field(None, max_length=4096)
    safety_identifier: str | None = Field(None, max_length=4096)
    moderation: Moderation | None = None

    tools: ToolList = Field(default=[])
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: FunctionList = Field(default=[])
    function_call: FunctionChoice | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_tokens_as_token_ids: bool = False
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
        if self.prompt_logprobs is not None and self.stream:
            raise combination("prompt_logprobs", "'prompt_logprobs' are not available in a stream")
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise combination("max_tokens", "'max_tokens' and 'max_completion_tokens' may not be set to two values")
        if self.continue_final_message and self.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
            raise combination("continue_final_message", message)
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "'continue_final_message' needs a last message of the role 'assistant'"
            raise combination("continue_final_message", message)
        try:
            _ = self.toolset
        except Mismatch as error:
            raise combination(error.param, str(error)) from None
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

    @cached_property
    def toolset(self) -> Tools | None:
        """What may be called. Raises `Mismatch` for fields that contradict each other."""
        if self.tools and self.functions:
            raise Mismatch("functions", "'functions' and 'tools' exclude each other")
        if self.functions or self.function_call is not None:
            return chosen_functions(self.functions, self.function_call)
        return chosen_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all content, in which a template may add but from which it takes little away."""
        return sum(len(plain_text(message.content).encode("utf-8", "surrogatepass")) for message in self.messages)

    @property
    def is_large(self) -> bool:
        """Whether rendering and encoding take long enough to be done beside the event loop."""
        beside = sum(size_beside_text(message) for message in self.messages)
        tools = 0 if self.toolset is None else len(orjson.dumps(self.toolset.shown))
        return self.text_bytes + beside + tools + 100 * len(self.messages) > INLINE_BYTES

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as plain data for a chat template."""
        return template_turns(self.messages)
