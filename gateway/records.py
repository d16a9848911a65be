"""Which kinds of records the gateway keeps for its tenants, and how much of each one tenant may keep.

Knows names and settings: no record's content and no store.
"""

from __future__ import annotations

from noria.engine.wire.record_store import RecordLimits
from noria.gateway.config import GatewaySettings

RESPONSE = "response"
CONVERSATION = "conversation"
ITEM = "item"
"""One item of a conversation; the kind's part is the conversation's id."""

FILE = "file"
"""Its bytes are the file's content."""
UPLOAD = "upload"
PART = "upload_part"
"""Part of an upload, with its bytes; the kind's part is the upload's id."""

BATCH = "batch"
CHAT_COMPLETION = "chat_completion"


def record_limits(settings: GatewaySettings) -> dict[str, RecordLimits]:
    """Answers are stored in passing, so the oldest make room there; what a client keeps on
    purpose is never dropped for something new."""
    return {
        RESPONSE: RecordLimits(size=settings.max_response_bytes, evict=True),
        CONVERSATION: RecordLimits(size=settings.max_conversation_bytes),
        ITEM: RecordLimits(size=settings.max_conversation_bytes),
        FILE: RecordLimits(size=settings.max_stored_file_bytes),
        PART: RecordLimits(size=settings.max_stored_file_bytes),
        CHAT_COMPLETION: RecordLimits(size=settings.max_response_bytes, evict=True),
    }
