"""An upload, a file that comes in parts: what a client may ask for, its records in the store, its shape in the API.

Knows no bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field

from noria.gateway.schemas.files import ExpiresAfter, FileRecord, Purpose
from noria.gateway.schemas.files import shown as shown_file
from noria.gateway.schemas.strict import FIRST_FAULT, RequestBody, at_most

LIFE = 3600
"""Seconds in which an upload must be completed, as OpenAI has it."""

MAX_PART_BYTES = 64 * 1024 * 1024
"""Bytes of one part at most, as OpenAI has it."""

MAX_PARTS = 10_000


class UploadRequest(RequestBody):
    """`mime_type` is taken and not looked at: files are bytes here."""

    filename: str = Field(min_length=1, max_length=1024)
    purpose: Purpose
    bytes: int = Field(ge=0, le=8 * 2**30)
    mime_type: str = Field(max_length=256)
    expires_after: ExpiresAfter | None = None


class CompleteUploadRequest(RequestBody):
    """`part_ids` in the order of the file; `md5` of the whole, in hexadecimal digits."""

    part_ids: Annotated[list[Annotated[str, Field(min_length=1, max_length=128)]], FIRST_FAULT, at_most(MAX_PARTS)]
    md5: str | None = Field(None, pattern=r"^[0-9a-fA-F]{32}$")


class UploadRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """As it lies in the store for an hour. `life` is the file's, in seconds. `file_id` is set once it is completed."""

    filename: str
    purpose: str
    size: int  # bytes that its parts must have
    created_at: int  # Unix seconds
    life: int | None = None
    status: str = "pending"
    file_id: str | None = None

    @property
    def expires_at(self) -> int:
        return self.created_at + LIFE


class PartRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One that is not `complete` is just arriving."""

    created_at: int  # Unix seconds
    size: int = 0  # bytes
    complete: bool = False


def shown(upload_id: str, upload: UploadRecord, file: FileRecord | None = None) -> dict[str, Any]:
    """`file` is what a completed upload became."""
    fields = {
        "id": upload_id,
        "object": "upload",
        "bytes": upload.size,
        "created_at": upload.created_at,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "expires_at": upload.expires_at,
    }
    if file is not None and upload.file_id is not None:
        fields["file"] = shown_file(upload.file_id, file)
    return fields


def shown_part(upload_id: str, part_id: str, part: PartRecord) -> dict[str, Any]:
    return {"id": part_id, "object": "upload.part", "created_at": part.created_at, "upload_id": upload_id}
