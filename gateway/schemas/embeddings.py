"""The requests that ask for vectors, or for what is computed from them: embeddings, scores, rankings.

Knows no tokenizer and no vector.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.prompted import Prompt, PromptedRequest, Prompts, prompt_list

MAX_INPUTS = 2048
"""Texts in one request at most, as OpenAI has it for embeddings."""


def _inputs(value: Any) -> list[Prompt]:
    prompts = prompt_list(value)
    if len(prompts) > MAX_INPUTS:
        most = {"got": len(prompts), "most": MAX_INPUTS}
        raise PydanticCustomError("too_many_inputs", "{got} inputs are more than the {most} allowed", most)
    if "" in prompts:
        place = {"place": prompts.index("")}
        raise PydanticCustomError("empty_input", "input {place} is the empty string", place)
    return prompts


Inputs = Annotated[list[Prompt], PlainValidator(_inputs, json_schema_input_type=Prompts)]


class EmbeddingRequest(PromptedRequest):
    """Vectors of inputs. `normalize` and `add_special_tokens` are vLLM's; `dimensions` keeps the first numbers."""

    refused: ClassVar = {
        "messages": "is not supported for embeddings: use 'input'",
        "embed_dtype": "is not supported by this server: vectors are float32",
        "endianness": "is not supported by this server: vectors are little-endian",
    }

    input: Inputs = Field()
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    normalize: bool = True
    add_special_tokens: bool = True
