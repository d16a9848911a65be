"""The requests of /v1/messages, Anthropic's dialect of a chat: turns of content blocks, tools, thinking.

What this server has no use for is refused here by name, or accepted in the one value that asks for nothing. Knows no
template.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from noria.gateway.schemas.anthropic_blocks import CacheControl, TextBlock, Turn
from noria.gateway.schemas.sampling import StopString, combination
from noria.gateway.schemas.strict import FIRST_FAULT, RequestBody, Strict, at_most, only_kinds

_ABSENT = dict.fromkeys(
    ("container", "context_management", "mcp_servers", "diagnostics", "inference_geo", "fallbacks"),
    "is not supported by this server",
) | {
    "user_profile_id": "is not supported by this server: whose request it is, its key says",
    "workspace_id": "is not supported by this server: whose request it is, its key says",
    "max_tokens_to_sample": "is not a parameter of messages: use 'max_tokens'",
    "prompt": "is not a parameter of messages: use 'messages'",
    "stop": "is not a parameter of messages: use 'stop_sequences'",
}
"""Documented or often tried, and what to say of it."""


class CustomTool(Strict):
    """`eager_input_streaming` is how every call is streamed; `cache_control` asks for what the prefix cache does."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] = False
    allowed_callers: Annotated[list[Literal["direct"]], at_most(2)] | None = None


_CUSTOM_ONLY = only_kinds(
    "custom", error="tool_kind", message="tools of type '{kind}' are not supported: only custom ones are"
)


class AutoChoice(Strict):
    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyChoice(Strict):
    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class ToolChoice(Strict):
    type: Literal["tool"]
    name: str = Field(max_length=64)
    disable_parallel_tool_use: bool = False


class NoChoice(Strict):
    type: Literal["none"]


class ThinkingOn(Strict):
    """`budget_tokens` is how much the client expects: nothing here holds a model to it but `max_tokens`. `display`
    "omitted" leaves the thoughts out of the answer; they are never summarized."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1024)
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Strict):
    """As the model has it."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingOff(Strict):
    type: Literal["disabled"]


class JsonFormat(Strict):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class RequestMetadata(Strict):
    user_id: str | None = Field(None, max_length=512)


class InputFields(RequestBody):
    """What makes up the prompt."""

    refused: ClassVar = _ABSENT

    model: str = Field(min_length=1, max_length=512)
    messages: Annotated[list[Turn], FIRST_FAULT] = Field(min_length=1)
    system: str | Annotated[list[TextBlock], FIRST_FAULT] | None = None
    tools: Annotated[list[Annotated[CustomTool, _CUSTOM_ONLY]], FIRST_FAULT, at_most(128)] = Field(default=[])
    tool_choice: Annotated[AutoChoice | AnyChoice | ToolChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")] | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None
    speed: Literal["standard"] = "standard"

    @property
    def shows_thoughts(self) -> bool:
        return self.thinking is None or getattr(self.thinking, "display", None) != "omitted"


class CountTokensRequest(InputFields):
    """How long a prompt is."""


class MessagesRequest(InputFields):
    """A message as asked for. From `min_p` on: what chat completions know too, under the same names."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: Annotated[list[StopString], FIRST_FAULT, at_most(256)] = Field(default=[])
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31 - 1)
    metadata: RequestMetadata = RequestMetadata()
    service_tier: Literal["auto", "standard_only"] = "auto"

    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    @model_validator(mode="after")
    def _a_budget_within_the_tokens(self) -> MessagesRequest:
        if isinstance(self.thinking, ThinkingOn) and self.thinking.budget_tokens >= self.max_tokens:
            message = "'thinking.budget_tokens' must be less than 'max_tokens'"
            raise combination("thinking.budget_tokens", message)
        return self
