"""The shape of a message, streamed or whole, around the blocks that an answer grows.

Knows the events' order and how they are spelled; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from noria.engine.wire.messages import Usage
from noria.gateway.answering import Answer
from noria.gateway.choice import Delta
from noria.gateway.errors import GatewayError
from noria.gateway.generation import Generation
from noria.gateway.messages.blocks import Blocks
from noria.gateway.messages.errors import shaped
from noria.gateway.schemas.anthropic import MessagesRequest
from noria.gateway.services import Question

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageAnswer(Answer):
    """`request_id` is named in an error that breaks a stream off."""

    def __init__(self, request: MessagesRequest, question: Question, message_id: str, request_id: str) -> None:
        self._model = question.model.card.id
        self._num_prompt = len(question.prompts[0])
        self._id = message_id
        self._request_id = request_id
        self._streamed = request.stream
        self._written: list[bytes] = []
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        parsed = question.options.parser is not None
        self._blocks = Blocks(parsed=parsed, shows_thoughts=request.shows_thoughts, tell=self._tell)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        async for deltas in generation.deltas():
            self._take(deltas)
        self._blocks.end()
        return self._message(self._blocks.content, usage_fields(generation.usage()))

    def opening(self) -> bytes:
        self._tell("message_start", message=self._message([], usage_fields(Usage(self._num_prompt, 0))))
        return self._rendered() + _PING

    def of(self, deltas: Sequence[Delta]) -> bytes:
        self._take(deltas)
        return self._rendered()

    async def closing(self, usage: Usage) -> bytes:
        self._blocks.end()
        self._tell("message_delta", delta=self._stop, usage=usage_fields(usage))
        self._tell("message_stop")
        return self._rendered()

    def failed(self, error: GatewayError) -> bytes:
        _, body = shaped(error, self._request_id)
        return b"event: error\ndata: " + body + b"\n\n"

    def _take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._blocks.add(delta)
            if delta.finish is not None:
                self._stop = self._reason(delta)

    def _reason(self, last: Delta) -> dict[str, str | None]:
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        reason = "max_tokens" if last.finish == "length" else "tool_use" if self._blocks.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._stop,
            "usage": usage,
        }

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._streamed:
            self._written.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields})))

    def _rendered(self) -> bytes:
        written = b"".join(self._written)
        self._written.clear()
        return written


def usage_fields(usage: Usage) -> dict[str, Any]:
    """`input_tokens` are those that were not found in the cache, as Anthropic counts."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }
