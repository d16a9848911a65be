"""The requests of /v1/responses: one answer, a count of its input's tokens, a compaction.

What this server has no use for is refused here by name, or accepted in the one value that asks for nothing. Knows no
store and no template.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.metadata import Metadata
from noria.gateway.schemas.platform import Moderation, PromptCacheOptions
from noria.gateway.schemas.response_items import Items
from noria.gateway.schemas.sampling import MAX_LOGPROBS, StopString, combination
from noria.gateway.schemas.strict import FIRST_FAULT, RequestBody, Strict, at_most
from noria.gateway.schemas.tools import FUNCTIONS_ONLY

_ABSENT = {
    "prompt": "is not supported: this server keeps no prompt templates",
    "context_management": "is not supported by this server: use 'truncation', or POST /responses/compact",
    "background_options": "is not supported by this server",
    "access_programs": "is not supported by this server",
    "modalities": "is not supported: answers are text",
    "max_tokens": "is not a parameter of responses: use 'max_output_tokens'",
    "max_completion_tokens": "is not a parameter of responses: use 'max_output_tokens'",
    "messages": "is not a parameter of responses: use 'input'",
    "response_format": "is not a parameter of responses: use 'text.format'",
    "reasoning_effort": "is not a parameter of responses: use 'reasoning.effort'",
    "n": "is not a parameter of responses",
    "logprobs": "is not a parameter of responses: use 'include' and 'top_logprobs'",
}
"""Documented or often tried, and what to say of it."""

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "message.input_image.image_url",
]
"""All but the first name parts that no answer of this server has."""

LOGPROBS = "message.output_text.logprobs"


class FunctionTool(Strict):
    """`defer_loading`, `async`, `allowed_callers` and `output_schema` speak to OpenAI's tool search and programs: here
    every function is shown to the model, and every call goes to the client."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    asynchronous: bool | None = Field(None, alias="async")
    allowed_callers: Annotated[list[Literal["direct"]], at_most(2)] | None = None
    output_schema: dict[str, Any] | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str = Field(max_length=64)


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[Annotated[NamedFunction, FUNCTIONS_ONLY]], FIRST_FAULT, at_most(128)] = Field(min_length=1)


def _choice_kind(value: Any) -> str:
    if isinstance(value, str):
        return "mode"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "allowed_tools") else "other"


def _refuse_choice(value: Any) -> Any:
    raise PydanticCustomError("tool_choice", "expected none, auto, required, a function or allowed_tools")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedFunction, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")]
    | Annotated[None, BeforeValidator(_refuse_choice), Tag("other")],
    Discriminator(_choice_kind),
]


class PlainFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextOptionsField(Strict):
    format: Annotated[PlainFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] = PlainFormat(
        type="text"
    )
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """`context` says which earlier thoughts the model sees again: those of the current turn, or all."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


ConversationId = Annotated[str, Field(min_length=1, max_length=128)]


class ConversationRef(Strict):
    id: ConversationId


def _conversation_id(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


class ResponseStreamOptions(Strict):
    include_obfuscation: bool = False


class ResponseCacheOptions(PromptCacheOptions):
    """`prewarm` fills the prefix cache without an answer."""

    prewarm: bool = False


class ImageOptions(Strict):
    context_compression: Literal["auto", "disabled"] | None = None


class InputFields(RequestBody):
    """What makes up the input of an answer. `conversation` and `previous_response_id` put earlier items before it."""

    refused: ClassVar = _ABSENT

    model: str = Field(min_length=1, max_length=512)
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=128)
    conversation: Annotated[
        ConversationRef | None,
        BeforeValidator(_conversation_id, json_schema_input_type=ConversationId | ConversationRef | None),
    ] = None
    tools: Annotated[list[Annotated[FunctionTool, FUNCTIONS_ONLY]], FIRST_FAULT, at_most(128)] = Field(default=[])
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextOptionsField = TextOptionsField()
    truncation: Literal["auto", "disabled"] = "disabled"

    @model_validator(mode="after")
    def _one_history(self) -> InputFields:
        if self.previous_response_id is not None and self.conversation is not None:
            message = "'previous_response_id' and 'conversation' exclude each other"
            raise combination("previous_response_id", message)
        return self


class InputTokensRequest(InputFields):
    """`personality` is a trait of OpenAI's models: those here have one each."""

    personality: Literal["friendly", "pragmatic"] | None = None


class ResponseRequest(InputFields):
    """An answer as asked for. From `presence_penalty` on: what chat completions know too, under the same names."""

    background: bool = False
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Include], FIRST_FAULT, at_most(16)] = Field(default=[])
    max_output_tokens: int | None = Field(None, ge=16)
    max_tool_calls: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    metadata: Metadata = Field(default={})
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    prompt_cache_key: str | None = Field(None, max_length=4096)
    prompt_cache_options: ResponseCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: str | None = Field(None, max_length=128)
    user: str | None = Field(None, max_length=4096)
    moderation: Moderation | None = None
    image: ImageOptions | None = None

    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[StopString], FIRST_FAULT, at_most(256)] | StopString | None = None
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    @model_validator(mode="after")
    def _combinations(self) -> ResponseRequest:
        if self.input is None and self.previous_response_id is None and self.conversation is None:
            raise PydanticCustomError("missing", "Field required", {"param": "input"})
        if self.background and not self.store:
            raise combination("background", "'background' needs 'store' to be true: its answer is fetched later")
        if self.stream_options is not None and not self.stream:
            raise combination("stream_options", "'stream_options' is only allowed when 'stream' is true")
        if self.top_logprobs and LOGPROBS not in self.include:
            raise combination("top_logprobs", f"'top_logprobs' is only allowed when 'include' names '{LOGPROBS}'")
        return self

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in self.include

    @property
    def obfuscated(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_obfuscation

    @property
    def prewarm(self) -> bool:
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm


class CompactRequest(InputFields):
    """A conversation to be made short."""

    prompt_cache_key: str | None = Field(None, max_length=4096)
    prompt_cache_options: ResponseCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    image: ImageOptions | None = None
