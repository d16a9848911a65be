"""The key-value pairs that a client may attach to what it has stored, as OpenAI bounds them.

Knows nothing of what they are attached to.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from noria.gateway.schemas.strict import RequestBody, at_most


def _short_keys(value: dict[str, str]) -> dict[str, str]:
    if any(len(key) > 64 for key in value):
        raise PydanticCustomError("metadata_key", "keys have 64 characters at most")
    return value


Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], at_most(16), AfterValidator(_short_keys)]
"""Up to 16 pairs; keys of up to 64 characters, values of up to 512."""


class StoredChange(RequestBody):
    """What may be changed of a stored completion."""

    metadata: Metadata = Field(default={})
