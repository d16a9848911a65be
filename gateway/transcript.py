"""Frames taken apart into single tokens, and put together again as what one request said.

Knows no text and no store.
"""

from __future__ import annotations

from collections.abc import Iterator

from noria.engine.wire.messages import TokenFrame, TokenLogprob


def one_by_one(frame: TokenFrame) -> Iterator[TokenFrame]:
    """The same frame in pieces of one token, the end on the last."""
    last = len(frame.token_ids) - 1
    if last < 1:
        yield frame
        return
    for place, token_id in enumerate(frame.token_ids):
        scores = frame.logprobs[place : place + 1] if frame.logprobs is not None else None
        prompt = frame.prompt_logprobs if place == 0 else None
        ending = (frame.finish, frame.usage, frame.error) if place == last else (None, None, None)
        param = frame.error_param if place == last else None
        predicted = frame.predicted if place == 0 else None  # where it is read even if a stop string ends the rest
        yield TokenFrame(
            frame.request_id,
            frame.epoch,
            frame.seq + place,
            [token_id],
            scores,
            *ending,
            prompt_logprobs=prompt,
            error_param=param,
            predicted=predicted,
        )


class Transcript:
    """Everything that one request's frames said, as one frame: what is kept of an answer to give it again."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._ids: list[int] = []
        self._scores: list[TokenLogprob] | None = None
        self._prompt: list[TokenLogprob | None] | None = None
        self._last: TokenFrame | None = None
        self._predicted = (0, 0)

    def add(self, frame: TokenFrame) -> None:
        """Frames in order; what was added before is passed over."""
        new = frame.token_ids[len(self._ids) - frame.seq :] if frame.seq <= len(self._ids) else []
        if new and frame.logprobs is not None:
            self._scores = [*(self._scores or ()), *frame.logprobs[-len(new) :]]
        if frame.predicted is not None and (new or not frame.token_ids):
            self._predicted = (self._predicted[0] + frame.predicted[0], self._predicted[1] + frame.predicted[1])
        self._ids += new
        self._prompt = self._prompt or frame.prompt_logprobs
        if frame.finish is not None:
            self._last = frame

    def frame(self) -> TokenFrame:
        """Without an end where a stop string was the end: who reads it finds that again."""
        finish, usage = (None, None) if self._last is None else (self._last.finish, self._last.usage)
        return TokenFrame(
            self._request_id,
            0,
            0,
            self._ids,
            self._scores,
            finish,
            usage,
            prompt_logprobs=self._prompt,
            predicted=self._predicted if any(self._predicted) else None,
        )
