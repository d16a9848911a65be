"""Structured outputs as clients ask for them: OpenAI's `response_format`, and vLLM's fields for the same.

Shapes and names only: what lies inside a schema or a grammar is `gateway.grammars`' to judge.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from noria.gateway.schemas.strict import Strict

JSONSchema = dict[str, Any]


class TextFormat(Strict):
    type: Literal["text"]


class JSONObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    """`strict` changes nothing: a schema is enforced in any case."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = Field(None, max_length=65_536)
    schema_: JSONSchema = Field({}, alias="schema")
    strict: bool | None = None


class JSONSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(Strict):
    """vLLM's: free text with parts in it that have a form; `structures` and `triggers` are its older way to say so."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = Annotated[
    TextFormat | JSONObjectFormat | JSONSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: exactly one of the first six."""

    json_: JSONSchema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    structural_tag: str | None = None

    disable_fallback: bool = False  # there is one backend
    disable_any_whitespace: Literal[False] = False
    disable_additional_properties: bool = False  # they are not written in any case
    whitespace_pattern: None = None
