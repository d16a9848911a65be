"""The request of POST /v1/completions: one or many prompts, each a text or a list of token ids.

Knows no tokenizer: whether an id exists is checked where the model is known.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator, model_validator

from noria.gateway.schemas.prompted import Prompt, Prompts, prompt_list
from noria.gateway.schemas.sampling import MAX_LOGPROBS, REFUSED, SamplingFields, combination


class CompletionRequest(SamplingFields):
    """A completion as asked for. `max_tokens` 0 is legal with `echo`: it scores the prompt and writes nothing.
    `best_of` samples are computed, and of these the `n` with the highest log-probability per token are given."""

    refused: ClassVar = REFUSED | {
        "max_completion_tokens": "is not a parameter of completions: use 'max_tokens'",
        "tools": "is not supported for completions", "messages": "is not a parameter of completions: use 'prompt'",
    }  # fmt: skip

    prompt: Annotated[list[Prompt], PlainValidator(prompt_list, json_schema_input_type=Prompts)] = Field()
    max_tokens: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise combination("max_tokens", "'max_tokens' may be 0 only when 'echo' is true")
        if self.samples < self.n:
            raise combination("best_of", "'best_of' must not be less than 'n'")
        if self.samples > self.n and self.stream:
            raise combination("best_of", "'best_of' above 'n' is not allowed when 'stream' is true")
        if self.suffix and self.echo:
            raise combination("suffix", "'suffix' and 'echo' exclude each other")
        return self

    @property
    def samples(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives that the prompt's tokens are scored with: for the answer itself, or as part of its echo."""
        echoed = self.logprobs if self.echo else None
        return max((most for most in (echoed, self.prompt_logprobs) if most is not None), default=None)

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives for the output's tokens; the best of many samples is found by their own scores."""
        return 0 if self.logprobs is None and self.samples > self.n else self.logprobs
