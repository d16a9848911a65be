"""What an operator may ask of adapters, in vLLM's words.

Knows no store.
"""

from __future__ import annotations

from pydantic import Field

from noria.gateway.schemas.strict import RequestBody


class LoadAdapterRequest(RequestBody):
    """`lora_path` is a folder as engines see it. `base_model_name` is needed where several models are served. With
    `load_inplace` it may take the place of another adapter of its name."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str = Field(min_length=1, max_length=4096)
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadAdapterRequest(RequestBody):
    """vLLM's `lora_int_id` is refused: there are no such numbers here."""

    lora_name: str = Field(min_length=1, max_length=128)
    base_model_name: str | None = None
