"""The fields that hold an output to a form, on every request that generates; and the grammar behind them.

Knows no sampling and no endpoint.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import model_validator

from noria.engine.wire.messages import Grammar
from noria.gateway.grammars.requested import requested_grammar
from noria.gateway.schemas.prompted import PromptedRequest
from noria.gateway.schemas.strict import FIRST_FAULT
from noria.gateway.schemas.structured import JSONSchema, ResponseFormat, StructuredOutputs


class GuidedRequest(PromptedRequest):
    """`response_format` is OpenAI's, the others are vLLM's. One of them at most."""

    response_format: ResponseFormat | None = None
    guided_json: JSONSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], FIRST_FAULT] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the output must match. Raises `InvalidRequest` at the first look, which is `_has_a_good_grammar`'s."""
        return requested_grammar(self)

    @model_validator(mode="after")
    def _has_a_good_grammar(self) -> GuidedRequest:
        _ = self.grammar
        return self
