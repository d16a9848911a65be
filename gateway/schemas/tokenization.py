"""The requests of /tokenize and /detokenize, in vLLM's shape: no `model` is needed where only one is served.

Knows no tokenizer.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from noria.gateway.schemas.strict import FIRST_FAULT, RequestBody

CHAT_FIELDS = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
)  # fmt: skip
"""Fields of /tokenize that a conversation has as chat completions have them."""


class TokenizeText(RequestBody):
    """A text to encode. Control tokens that it spells stay text."""

    refused: ClassVar = {"chat_template": "is refused: the model's own template is always used"}

    model: str | None = Field(None, min_length=1, max_length=512)
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(RequestBody):
    """What /tokenize takes beside `CHAT_FIELDS` for a conversation."""

    refused: ClassVar = TokenizeText.refused

    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody):
    model: str | None = Field(None, min_length=1, max_length=512)
    tokens: Annotated[list[int], FIRST_FAULT]
