"""The answer to a chat completion as it goes out: chunks of a stream, or one object.

Knows no HTTP, and formats of calls only as pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from noria.engine.wire.messages import Usage
from noria.gateway.answering import Answer, Identity
from noria.gateway.choice import Delta
from noria.gateway.collect import collect
from noria.gateway.generation import Generation
from noria.gateway.schemas.answers import Chunks, Head, chat_logprobs, prompt_scores, usage_fields
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.chat_answer import delta_fields, message
from noria.gateway.schemas.platform import moderated
from noria.gateway.services import Question
from noria.gateway.streaming import DONE


class ChatAnswer(Answer):
    """The shape of one request's answer."""

    def __init__(self, request: ChatRequest, question: Question, identity: Identity) -> None:
        self._request = request
        self._tokenizer = question.model.tokenizer
        self._prompt = question.prompts[0]
        self._parsed = question.options.parser is not None
        self._tools = request.toolset
        self._legacy = self._tools is not None and self._tools.legacy
        self._called: set[int] = set()  # choices with a call in them
        self._head = Head(
            id=identity.id,
            object="chat.completion.chunk" if request.stream else "chat.completion",
            created=identity.created,
            model=question.model.card.id,
            system_fingerprint=identity.fingerprint,
            service_tier=request.service_class,
        )
        self._chunks = Chunks(
            self._head,
            include_usage=request.include_usage,
            cursor=identity.cursor,
            obfuscate=request.obfuscates,
        )

    async def whole(self, generation: Generation) -> dict[str, Any]:
        choices, usage = await collect(generation), generation.usage()
        body = {**self._head.fields(), "choices": [self._choice(c) for c in choices], "usage": usage_fields(usage)}
        num_top, scores = self._request.prompt_logprobs, choices[0].prompt_logprobs
        if num_top is not None:
            body["prompt_logprobs"] = prompt_scores(self._tokenizer, scores or [], num_top)
        return body | self._beside()

    def opening(self) -> bytes:
        content = b'""' if self._tools is None else b"null"  # there may be none beside calls
        beside = self._beside()
        first = orjson.dumps(beside)[1:-1] + b"," if beside else b""
        return b"".join(
            self._chunks.role(index, content, first if index == 0 else b"") for index in range(self._request.n)
        )

    def of(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._chunk(delta) for delta in deltas])

    async def closing(self, usage: Usage) -> bytes:
        return (self._chunks.usage(usage) if self._request.include_usage else b"") + DONE

    def _beside(self) -> dict[str, Any]:
        """Fields of the answer beside its choices, which were asked for: in the whole, or in a stream's first chunk."""
        beside: dict[str, Any] = {}
        if self._request.return_token_ids:
            beside["prompt_token_ids"] = self._prompt
        if self._request.moderation is not None:
            beside["moderation"] = moderated()
        return beside

    def _choice(self, choice: Delta) -> dict[str, Any]:
        said, called = message(choice, parsed=self._parsed, legacy=self._legacy)
        if called:
            self._called.add(choice.index)
        made = {
            "index": choice.index,
            "message": said,
            "logprobs": self._logprobs(choice) if self._request.logprobs else None,
            "finish_reason": self._finish(choice),
            "stop_reason": choice.stop_reason,
        }
        return {**made, "token_ids": choice.token_ids} if self._request.return_token_ids else made

    def _chunk(self, delta: Delta) -> bytes:
        fields: bytes | None = None
        if self._parsed:
            if delta.pieces:
                fields, called = delta_fields(delta.pieces, legacy=self._legacy)
                if called:
                    self._called.add(delta.index)
        elif delta.text:
            fields = b'{"content":%s}' % orjson.dumps(delta.text)
        logprobs, more = b"null", b""
        if delta.tokens and self._request.logprobs:
            logprobs = orjson.dumps(self._logprobs(delta))
        if delta.token_ids:
            more = b',"token_ids":%s' % orjson.dumps(delta.token_ids)
        if fields is None and (delta.tokens or more):
            fields = b"{}" if self._parsed else b'{"content":""}'
        return self._chunks.chat(delta, fields, logprobs, self._finish(delta), more)

    def _finish(self, delta: Delta) -> str | None:
        if delta.finish is None or self._tools is None or delta.index not in self._called:
            return delta.finish
        return self._tools.finish(delta.finish)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        num_top = self._request.top_logprobs or 0
        return chat_logprobs(self._tokenizer, delta.tokens, num_top, as_ids=self._request.return_tokens_as_token_ids)
