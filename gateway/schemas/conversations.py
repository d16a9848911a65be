"""The requests of /v1/conversations.

Knows no store.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from noria.gateway.schemas.metadata import Metadata
from noria.gateway.schemas.response_items import NewItem
from noria.gateway.schemas.strict import FIRST_FAULT, RequestBody, at_most

MAX_ITEMS_AT_ONCE = 20
"""As OpenAI has it."""

NewItems = Annotated[list[NewItem], FIRST_FAULT, at_most(MAX_ITEMS_AT_ONCE)]


class ConversationRequest(RequestBody):
    items: NewItems = Field(default=[])
    metadata: Metadata = Field(default={})


class ConversationChange(RequestBody):
    metadata: Metadata


class ItemsRequest(RequestBody):
    items: NewItems = Field(min_length=1)
