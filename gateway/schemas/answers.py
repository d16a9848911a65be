"""The shapes of answers: usage, log-probabilities, and stream chunks with their constant part rendered once.

Knows tokens only through a tokenizer that spells them; knows nothing of where they come from.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from noria.engine.wire.messages import TokenLogprob, Usage
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.choice import Delta, ScoredToken
from noria.gateway.cursor import BEGUN, END, TEXT, Cursor, Mark
from noria.gateway.schemas.scores import chat_entries, finite


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in every object of one answer."""

    id: str
    object: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str
    service_tier: str

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": self.system_fingerprint,
        }


_OBFUSCATION_BLOCK = 64
"""Bytes. A token's text is rarely longer, so that most events of a stream have one of two lengths."""

PromptToken = tuple[int, TokenLogprob | None, int]
"""Id, score (None for a prompt's first token) and offset of an echoed token."""


class Chunks:
    """Renders server-sent events of one stream. With `include_usage` every chunk but the last says `usage: null`.
    With a cursor every event has an id, and those that the client has seen are left out. With `obfuscate` the length
    of an event tells little of its text."""

    def __init__(
        self, head: Head, *, include_usage: bool, cursor: Cursor | None = None, obfuscate: bool = False
    ) -> None:
        self._cursor = cursor
        self._obfuscate = obfuscate
        self._start = b"data: " + orjson.dumps(head.fields())[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def role(self, index: int, content: bytes = b'""', first: bytes = b"") -> bytes:
        """The chunk that begins a choice; `first` are fields of the chunk beside its choices, with a comma behind."""
        delta = b'"delta":{"role":"assistant","content":%s,"refusal":null}' % content
        start = self._start if not first else self._start.removesuffix(b'"choices":[') + first + b'"choices":['
        event = b'%s{"index":%d,%s,"logprobs":null,"finish_reason":null}%s' % (start, index, delta, self._end)
        return self._finished(event, index, BEGUN)

    def chat(
        self, delta: Delta, fields: bytes | None, logprobs: bytes, finish: str | None, extras: bytes = b""
    ) -> bytes:
        """The chunks of one delta: `fields` of the message, if there are any, with `extras` beside them, each with a
        comma before it; and the end in a chunk of its own."""
        event = end = b""
        if fields is not None:
            event = b'%s{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":null%s}%s' % (
                self._start,
                delta.index,
                fields,
                logprobs,
                extras,
                self._end,
            )
            event = self._finished(event, delta.index, (delta.consumed, TEXT if delta.finish else 0))
        if finish is not None:
            end = b'%s{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s","stop_reason":%s}%s' % (
                self._start,
                delta.index,
                finish.encode(),
                orjson.dumps(delta.stop_reason),
                self._end,
            )
            end = self._finished(end, delta.index, (delta.consumed, END))
        return event + end

    def text(self, delta: Delta, logprobs: bytes, extras: bytes = b"") -> bytes:
        """One chunk of a plain completion. `extras` are further fields of its choice, each with a comma before it."""
        finish = b'"%s"' % delta.finish.encode() if delta.finish else b"null"
        event = b'%s{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s%s}%s' % (
            self._start,
            delta.index,
            orjson.dumps(delta.text),
            logprobs,
            finish,
            extras,
            self._end,
        )
        return self._finished(event, delta.index, (delta.consumed, END if delta.finish else 0))

    def usage(self, usage: Usage) -> bytes:
        event = self._start + b'],"usage":' + orjson.dumps(usage_fields(usage)) + b"}\n\n"
        return event if self._cursor is None else self._cursor.tag_usage(event)

    def _finished(self, event: bytes, index: int, mark: Mark) -> bytes:
        if self._obfuscate:
            event = padded(event)
        return event if self._cursor is None else self._cursor.tag(event, index, mark)


def padded(event: bytes) -> bytes:
    """The event with a field of random characters that rounds its length up to whole blocks."""
    start, end = event.removesuffix(b"}\n\n") + b',"obfuscation":"', b'"}\n\n'
    room = -(len(start) + len(end)) % _OBFUSCATION_BLOCK or _OBFUSCATION_BLOCK  # some, always
    return start + secrets.token_urlsafe(room)[:room].encode() + end


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """Chat's shape; see `chat_entries`."""
    return {"content": chat_entries(tokenizer, tokens, num_top, as_ids=as_ids), "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int, prompt: Sequence[PromptToken]
) -> dict[str, Any]:
    """Completions' shape: parallel lists, echoed tokens first. A token's alternatives always include the token."""
    scored = [*prompt, *((token.score.token_id, token.score, token.offset) for token in tokens)]
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id, _, _ in scored],
        "token_logprobs": [None if score is None else finite(score.logprob) for _, score, _ in scored],
        "top_logprobs": [None if score is None else _alternatives(tokenizer, score, num_top) for _, score, _ in scored],
        "text_offset": [offset for _, _, offset in scored],
    }


def prompt_scores(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape of `prompt_logprobs`: per prompt token its own entry and those of its best alternatives, by id."""
    return [None if score is None else _by_id(tokenizer, score, num_top) for score in scores]


def _by_id(tokenizer: Tokenizer, score: TokenLogprob, num_top: int) -> dict[str, dict[str, Any]]:
    best = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(score.top[:num_top], 1)]
    own = (score.token_id, score.logprob, score.rank)
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, logprob, rank in [*best, *([own] if all(entry[0] != own[0] for entry in best) else [])]
    }


def _alternatives(tokenizer: Tokenizer, score: TokenLogprob, num_top: int) -> dict[str, float]:
    # Later pairs win where two tokens are spelled alike, so the best go in last.
    pairs = [(score.token_id, score.logprob), *reversed(score.top[:num_top])]
    best_last = {tokenizer.token_text(token_id): finite(logprob) for token_id, logprob in pairs}
    return dict(sorted(best_last.items(), key=lambda item: -item[1]))
