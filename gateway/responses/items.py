"""Items as they are shown and kept, and what they say as the messages of a chat.

Knows no store and no template.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from noria.gateway.errors import InvalidRequest
from noria.gateway.schemas.response_items import (
    CompactionItem,
    FunctionCallItem,
    FunctionOutputItem,
    ItemReference,
    MessageItem,
    ReasoningItem,
)

MAX_FILE_BYTES = 1024 * 1024
"""A file inside a request at most, decoded."""

Shown = dict[str, Any]
GivenItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | CompactionItem | ItemReference

_COMPACTED = "noria-1."


def given_items(given: str | Sequence[GivenItem] | None) -> list[GivenItem]:
    """A text is one message of the user."""
    if isinstance(given, str):
        return [MessageItem(type="message", role="user", content=given)]
    return list(given or ())


def shown(item: GivenItem, item_id: str) -> Shown:
    """The item as it is listed. References have been resolved before."""
    if isinstance(item, MessageItem):
        return {"id": item_id, "type": "message", "status": "completed", **_message_fields(item)}
    kept = item.model_dump(exclude_none=True, exclude={"id", "status"})
    if isinstance(item, FunctionCallItem | FunctionOutputItem):
        return {"id": item_id, "status": "completed", **kept}
    if isinstance(item, CompactionItem):
        kept["type"] = "compaction"
    return {"id": item_id, **kept}


def _message_fields(item: MessageItem) -> Shown:
    spoken = item.role == "assistant"
    fields: Shown = {"role": item.role}
    if item.phase is not None:
        fields["phase"] = item.phase
    if isinstance(item.content, str):
        content: list[Shown] = [{"type": "output_text" if spoken else "input_text", "text": item.content}]
    else:
        content = [part.model_dump(exclude_none=True) for part in item.content]
    for part in content:
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
            part.setdefault("logprobs", [])
    return {**fields, "content": content}


def as_messages(
    items: Sequence[Shown], *, all_thoughts: bool = False, files: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Messages of a chat. Thoughts go with the turn of the assistant that follows them, those of earlier turns only
    with `all_thoughts`. `files` are the texts of files by their ids. Raises `InvalidRequest` for an output without its
    call."""

    def text_of(content: str | Sequence[Shown]) -> str:
        return content if isinstance(content, str) else "".join(_part_text(part, files or {}) for part in content)

    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # call id -> function
    thoughts: list[str] = []
    turn_begins = max((at for at, item in enumerate(items) if item.get("role") == "user"), default=-1)
    for at, item in enumerate(items):
        kind = item["type"]
        if kind == "message":
            message: dict[str, Any] = {"role": item["role"], "content": text_of(item["content"])}
            messages.append(_thought_through(message, thoughts) if item["role"] == "assistant" else message)
        elif kind == "function_call":
            names[item["call_id"]] = item["name"]
            if not messages or messages[-1]["role"] != "assistant":
                messages.append(_thought_through({"role": "assistant", "content": None}, thoughts))
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if item["call_id"] not in names:
                message_text = f"No tool call found for function call output with call_id {item['call_id']}."
                raise InvalidRequest(message_text, param="input")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
        elif kind == "reasoning" and (all_thoughts or at > turn_begins):
            thoughts.append(text_of(item.get("content") or item["summary"]))
        elif kind == "compaction":
            text = "What was said so far, in short:\n\n" + opened(item["encrypted_content"])
            messages.append({"role": "user", "content": text})
    return messages


def _thought_through(message: dict[str, Any], thoughts: list[str]) -> dict[str, Any]:
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
        thoughts.clear()
    return message


def _part_text(part: Shown, files: Mapping[str, str]) -> str:
    if part["type"] != "input_file":
        return str(part["refusal"] if part["type"] == "refusal" else part["text"])
    name = part.get("filename") or part.get("file_id") or "file"
    text = files[part["file_id"]] if "file_id" in part else file_text(part.get("file_data", ""), "input")
    return f"\n{name}:\n{text}\n"


def file_text(data: str, param: str) -> str:
    """The text of a file given in base64, plain or as a data URL. Raises `InvalidRequest` for what is no text."""
    head, comma, body = data.partition(",")
    encoded = body if comma and head.startswith("data:") else data
    if len(encoded) > MAX_FILE_BYTES * 4 // 3 + 4:
        message = f"Invalid '{param}': a file inside a request has {MAX_FILE_BYTES} bytes at most."
        raise InvalidRequest(message, param=param, code="invalid_value")
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        message = f"Invalid '{param}': only text files in UTF-8, given in base64, can be read."
        raise InvalidRequest(message, param=param, code="invalid_value") from None


def compacted(text: str) -> str:
    """What a compaction item carries. It is no secret: only opaque, as the API has it."""
    return _COMPACTED + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def opened(carried: str) -> str:
    """Raises `InvalidRequest` for what `compacted` did not make."""
    try:
        if not carried.startswith(_COMPACTED):
            raise ValueError
        unpacker = zlib.decompressobj()
        packed = base64.urlsafe_b64decode(carried.removeprefix(_COMPACTED))
        text = unpacker.decompress(packed, MAX_FILE_BYTES).decode()
        if not unpacker.eof:
            raise ValueError
        return text
    except (ValueError, zlib.error):
        message = "Invalid 'input': the compaction item was not made by this server."
        raise InvalidRequest(message, param="input", code="invalid_value") from None
