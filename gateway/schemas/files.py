"""A file as the API shows it, and what may be said about one in the fields of an upload.

Knows no bytes and no store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from noria.gateway.schemas.strict import RequestBody, Strict

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
"""What a client may upload a file for. All are kept alike; the batch API reads files of its own purpose only."""

OUTPUT = "batch_output"


class ExpiresAfter(Strict):
    """A file's life in seconds: an hour to thirty days."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class UploadFields(RequestBody):
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """As it lies in the store. `expires_at` is None for a file that stays until it is deleted. A file that is not
    `complete` is still being written, and nobody sees it."""

    filename: str
    purpose: str
    created_at: int  # Unix seconds
    size: int = 0  # bytes
    expires_at: int | None = None
    complete: bool = False

    def gone(self, now: float) -> bool:
        """Whether nobody sees it: not yet, or not any more."""
        return not self.complete or (self.expires_at is not None and now >= self.expires_at)


def shown(file_id: str, file: FileRecord) -> dict[str, Any]:
    return {
        "id": file_id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def nested(fields: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a form as a JSON body would have them: `expires_after[seconds]` is a field of an object, and a
    number."""
    body: dict[str, Any] = {}
    for name, text in fields.items():
        outer, bracket, inner = name.partition("[")
        value: Any = int(text) if name == "expires_after[seconds]" and text.isdigit() and len(text) < 20 else text
        if bracket and inner.endswith("]") and isinstance(body.setdefault(outer, {}), dict):
            body[outer][inner[:-1]] = value
        else:
            body[name] = value
    return body
