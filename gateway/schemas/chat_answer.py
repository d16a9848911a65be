"""What the assistant says in chat completions' shape: a message, or the delta of one, from the pieces of an answer.

Knows no stream and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from noria.gateway.choice import Delta
from noria.gateway.text.pieces import Parts, Piece, ReasoningPiece, TextPiece, joined


def message(choice: Delta, *, parsed: bool, legacy: bool) -> tuple[dict[str, Any], bool]:
    """The message of a whole choice, and whether there are calls in it; `legacy`: a call is a `function_call`."""
    parts = joined(choice.pieces) if parsed else Parts(choice.text)
    content = parts.text if parts.text or not (parts.calls or parts.reasoning) else None
    made: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if parts.reasoning:
        made["reasoning_content"] = parts.reasoning
    if parts.calls and legacy:
        made["function_call"] = {"name": parts.calls[0].name, "arguments": parts.calls[0].arguments}
    elif parts.calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parts.calls
        ]
    return made, bool(parts.calls)


def delta_fields(pieces: Sequence[Piece], *, legacy: bool) -> tuple[bytes, bool]:
    """The `delta` of a chunk as JSON, and whether there are calls in it."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, TextPiece):
            fields["content"] = fields.get("content", "") + piece.text
        elif isinstance(piece, ReasoningPiece):
            fields["reasoning_content"] = fields.get("reasoning_content", "") + piece.text
        elif piece.index in calls:
            calls[piece.index]["function"]["arguments"] += piece.arguments
        else:
            begun = {} if piece.id is None else {"id": piece.id, "type": "function"}
            named = {} if piece.name is None else {"name": piece.name}
            function = {**named, "arguments": piece.arguments}
            calls[piece.index] = {"index": piece.index, **begun, "function": function}
    if calls and legacy:
        fields["function_call"] = next(iter(calls.values()))["function"]
    elif calls:
        fields["tool_calls"] = list(calls.values())
    return orjson.dumps(fields), bool(calls)
