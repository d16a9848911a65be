"""What every request has that gives prompts to a model, and the four shapes in which prompts come.

Knows no tokenizer: whether an id exists is checked where the model is known.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.strict import RequestBody

Prompt = str | list[int]
Prompts = str | list[str] | list[int] | list[list[int]]


def prompt_list(value: Any) -> list[Prompt]:
    """The documented shapes (text, texts, ids, lists of ids) as one list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "expected a string, or a non-empty array of strings or of token ids")
    if _are_ids(value):
        return [value]
    if all(isinstance(item, str) for item in value) or all(isinstance(item, list) and _are_ids(item) for item in value):
        return value
    raise PydanticCustomError("prompt", "an array holds either strings, or token ids, or non-empty arrays of token ids")


def _are_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


class PromptedRequest(RequestBody):
    """`priority` and `truncate_prompt_tokens` are vLLM's: of one class, a lower number is served earlier; the last
    tokens of a prompt are kept, -1: as many as the context holds."""

    model: str = Field(min_length=1, max_length=512)
    user: str | None = Field(None, max_length=4096)
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("truncate", "a prompt needs a token: expected -1 or a number above 0")
        return value
