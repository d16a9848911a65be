"""The fields that chat and completions share: sampling, stopping, streaming, and OpenAI's bookkeeping fields.

Ranges are checked here; what depends on the model (vocabulary, context) is checked in `gateway.sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.guided import GuidedRequest
from noria.gateway.schemas.strict import FIRST_FAULT, Strict, at_most

MAX_LOGPROBS = 20
"""Alternatives per token at most."""

REFUSED = {
    "chat_template": "is refused: the model's own template is always used",
    "logits_processors": "is not supported by this server",
    "use_beam_search": "is not supported by this server", "length_penalty": "is not supported by this server",
    "allowed_token_ids": "is not supported by this server", "bad_words": "is not supported by this server",
}  # fmt: skip


def combination(param: str, message: str) -> PydanticCustomError:
    """The error of fields that are fine alone but not together; `param` is the one to name."""
    return PydanticCustomError("combination", message, {"param": param})


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[
    list[StopString],
    FIRST_FAULT,
    BeforeValidator(_stop_list, json_schema_input_type=StopString | list[StopString]),
    at_most(256),
]


class SamplingFields(GuidedRequest):
    """`temperature`, `top_p` and the penalties have OpenAI's ranges; `top_k` to `cache_salt` are vLLM's extras. A
    `cache_salt` keeps a prompt's blocks in the prefix cache apart from others'.
    """

    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    stop: Stops = Field(default=[])
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], at_most(4096)] = Field(default={})
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"

    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], at_most(256)] = Field(default=[])
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Literal[True] = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    cache_salt: str | None = Field(None, min_length=1, max_length=512)

    @field_validator("logit_bias")
    @classmethod
    def _token_keys(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                shown = {"key": repr(key[:32])}
                raise PydanticCustomError("logit_bias_key", "keys must be token ids, got {key}", shown)
        return value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise combination("stream_options", "'stream_options' is only allowed when 'stream' is true")
        return self

    @property
    def samples(self) -> int:
        """Choices that are computed for each prompt."""
        return self.n

    @property
    def wanted_tokens(self) -> int | None:
        """Output tokens asked for, if they were."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def obfuscates(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_obfuscation

    @property
    def service_class(self) -> str:
        """The queue class behind the service tier; it is also the tier that the answer names."""
        return "default" if self.service_tier == "auto" else self.service_tier
