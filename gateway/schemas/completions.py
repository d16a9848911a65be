"""The request of POST /v1/completions: one or many prompts, each a text or a list of token ids.

Knows no tokenizer: whether an id exists is checked where the model is known.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator, model_validator

from noria.gateway.schemas.prompted import Prompt, prompt_list
from noria.gateway.schemas.sampling import MAX_LOGPROBS, REFUSED, SamplingFields, combination


class CompletionRequest(SamplingFields):
    """A completion as asked for. `max_tokens` 0 is legal with `echo`: it scores the prompt and writes nothing."""

    refused: ClassVar = REFUSED | {
        "response_format": "is not supported for completions",
        "max_completion_tokens": "is not a parameter of completions: use 'max_tokens'",
        "tools": "is not supported for completions", "messages": "is not a parameter of completions: use 'prompt'",
    }  # fmt: skip

    prompt: Annotated[list[Prompt], PlainValidator(prompt_list)] = Field()
    max_tokens: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise combination("max_tokens", "'max_tokens' may be 0 only when 'echo' is true")
        if self.best_of is not None and self.best_of != self.n:
            raise combination("best_of", "'best_of' other than 'n' is not supported by this server")
        return self
