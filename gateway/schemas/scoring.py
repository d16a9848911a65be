"""The requests of /score (vLLM's) and /rerank (Jina's and Cohere's): how near texts are to each other.

Knows no tokenizer and no vector.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.embeddings import MAX_INPUTS
from noria.gateway.schemas.prompted import PromptedRequest
from noria.gateway.schemas.sampling import combination
from noria.gateway.schemas.strict import FIRST_FAULT, Strict, at_most

_ONLY_TEXT = "is not supported: only text can be scored"


def _text_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _plain_document(value: Any) -> Any:
    """Cohere's and Jina's document objects hold their text under `text`."""
    if isinstance(value, dict):
        if set(value) != {"text"}:
            raise PydanticCustomError("document", "expected a string or an object with the field 'text' alone")
        return value["text"]
    return value


class TextDocument(Strict):
    """A document as Cohere and Jina spell it."""

    text: str = Field(min_length=1)


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[
    list[Text],
    FIRST_FAULT,
    BeforeValidator(_text_list, json_schema_input_type=Text | list[Text]),
    at_most(MAX_INPUTS),
]
Document = Annotated[Text, BeforeValidator(_plain_document, json_schema_input_type=Text | TextDocument)]


class ScoreRequest(PromptedRequest):
    """Each of `text_1` against each of `text_2`, pair by pair, or one against all."""

    refused: ClassVar = {"data_1": _ONLY_TEXT, "data_2": _ONLY_TEXT}

    text_1: Texts = Field(min_length=1)
    text_2: Texts = Field(min_length=1)

    @model_validator(mode="after")
    def _pairs(self) -> ScoreRequest:
        if len(self.text_1) not in (1, len(self.text_2)):
            message = "'text_1' must be one text or as many as 'text_2'"
            raise combination("text_1", message)
        return self


class RerankRequest(PromptedRequest):
    """`top_n` results at most, the nearest first. `max_tokens_per_doc` cuts long documents at their end."""

    refused: ClassVar = {
        "rank_fields": "is not supported: documents are texts",
        "max_chunks_per_doc": "is not supported: use 'max_tokens_per_doc'",
    }

    query: Text
    documents: Annotated[list[Document], FIRST_FAULT, at_most(MAX_INPUTS)] = Field(min_length=1)
    top_n: int | None = Field(None, ge=0)
    return_documents: bool = True
    max_tokens_per_doc: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_cut(self) -> RerankRequest:
        if self.max_tokens_per_doc is not None and self.truncate_prompt_tokens is not None:
            message = "'max_tokens_per_doc' and 'truncate_prompt_tokens' exclude each other"
            raise combination("max_tokens_per_doc", message)
        return self
