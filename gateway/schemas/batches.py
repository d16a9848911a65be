"""A batch: what a client may ask for, its record in the store, and its shape in the API.

Knows no line of any input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from pydantic import Field

from noria.gateway.schemas.files import ExpiresAfter
from noria.gateway.schemas.metadata import Metadata
from noria.gateway.schemas.strict import RequestBody

WINDOW = 24 * 3600
"""Seconds in which a batch must be done."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

OVER = ("failed", "completed", "expired", "cancelled")


class BatchRequest(RequestBody):
    input_file_id: str = Field(min_length=1, max_length=128)
    endpoint: str = Field(min_length=1, max_length=128)
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class Fault(msgspec.Struct, frozen=True):
    """Why a batch cannot run; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """As it lies in the store. `times` holds, by the name of a status, when (Unix seconds) it was reached. Which lines
    are done is not in here, and `counts` and `usage` are set when all are: until then the store counts."""

    id: str
    tenant: str
    weight: float  # the tenant's share and cache group when it was created
    cache_group: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    created_at: int
    output_life: int  # seconds
    metadata: dict[str, str] | None = None
    status: str = "validating"
    times: dict[str, int] = {}
    model: str | None = None
    total: int = 0
    faults: list[Fault] = []
    counts: dict[str, int] = {}
    account: str = ""  # whom its lines are charged to; empty: nobody

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW

    @property
    def over(self) -> bool:
        return self.status in OVER

    def at(self, status: Status, now: float, **changes: Any) -> Batch:
        """The batch in another state."""
        return msgspec.structs.replace(self, status=status, times={**self.times, status: int(now)}, **changes)


_STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def shown(batch: Batch, counts: Mapping[str, int]) -> dict[str, Any]:
    """`counts` as the store has them, for a batch that is not over."""
    counts = batch.counts if batch.over else counts
    has = {kind: batch.over and counts.get(kind, 0) > 0 for kind in ("completed", "failed")}
    listed = [msgspec.to_builtins(fault) for fault in batch.faults]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": listed} if listed else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id if has["completed"] else None,
        "error_file_id": batch.error_file_id if has["failed"] else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{status}_at": batch.times.get(status) for status in _STAMPS},
        "request_counts": {
            "total": batch.total,
            "completed": counts.get("completed", 0),
            "failed": counts.get("failed", 0),
        },
        "usage": usage(counts),
        "metadata": batch.metadata,
    }


def usage(counts: Mapping[str, int]) -> dict[str, Any]:
    given, written = counts.get("input_tokens", 0), counts.get("output_tokens", 0)
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": counts.get("cached_tokens", 0)},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": counts.get("reasoning_tokens", 0)},
        "total_tokens": given + written,
    }
