"""One choice of an answer: token frames in, text deltas out, each token seen once, exactly one end.

Pure and synchronous. Knows no broker, no HTTP, no other choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from noria.engine.wire.messages import FinishReason, TokenFrame, TokenLogprob
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.errors import DeadlineExpired, EngineFault, InvalidRequest, Overloaded, RequestCancelled
from noria.gateway.text.detokenizer import Detokenizer
from noria.gateway.text.pieces import OutputParser, Piece
from noria.gateway.text.stop_strings import StopStrings

Ended = Literal["stop", "length"]

RETRY_AFTER = 5.0
"""Seconds after which to ask again for what an engine could not get to: the default limit of one grammar."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's log-probabilities, and where its text begins in the choice's text (characters)."""

    score: TokenLogprob
    offset: int


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `finish` is set exactly once, on its last delta; `consumed` are the output tokens
    read so far, those whose text is held back included. `pieces` are there for a choice with a parser: what its text
    is made of (a parser may hold back other parts of it than a stop string does). `token_ids` are there where they
    were asked for; `total_logprob` is of all tokens read so far, the end token included, where they are scored.
    `stop_reason` comes with an end that the request itself set: the stop string, or the id in `stop_token_ids`."""

    index: int
    consumed: int = 0
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: Ended | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    total_logprob: float = 0.0

    def extend(self, later: Delta) -> None:
        """Take in the delta that follows this one, so that a slow reader gets few and large chunks."""
        self.text += later.text
        self.tokens += later.tokens
        self.pieces += later.pieces
        self.token_ids += later.token_ids
        self.total_logprob = later.total_logprob
        self.finish = later.finish
        self.stop_reason = later.stop_reason
        self.consumed = later.consumed
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs

    def __bool__(self) -> bool:
        said = self.text or self.tokens or self.pieces or self.token_ids
        return bool(said or self.finish or self.prompt_logprobs is not None)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The text conditions of a request. `end_ids` are the tokens that end it and are no part of its text; `spelled`
    are the control tokens that are; `stop_ids` end it because the request says so. `parser` makes what takes a choice's
    text apart, from the id of its request: what a parser makes up (the ids of calls) is the same whenever the answer is
    read. `token_ids`: they are wanted too."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    token_ids: bool = False
    spelled: frozenset[int] = frozenset()
    parser: Callable[[str], OutputParser] | None = None


class ChoiceReader:
    """Reads one request's frames.

    A request that moved to another engine is published again from its first token under a higher epoch: what was
    seen is dropped by `seq`. Log-probabilities leave together with the text they belong to: a token's entry is kept
    back until some of its text is out, so entries of text that a stop string cuts off are never sent, and what is
    sent does not depend on how the frames were batched.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, options: TextOptions, request_id: str = "") -> None:
        self.index = index
        self.ended = False
        self.stopped_by_text = False  # the engine does not know yet: it has to be told
        self.num_tokens = 0  # output tokens consumed, the end token included
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.predicted_right = self.predicted_wrong = 0  # tokens of the prediction that were tried
        self._options = options
        self._epoch = 0
        self._detokenizer = Detokenizer(tokenizer, options.spelled)
        self._stops = StopStrings(options.stop, include_stop_str_in_output=options.include_stop)
        self._text_chars = 0  # produced by the detokenizer
        self._sent_chars = 0
        self._held: deque[ScoredToken] = deque()
        self._total_logprob = 0.0
        self._parser = None if options.parser is None else options.parser(request_id)

    def restart_epoch(self) -> None:
        """Accept any epoch again: the request was offered anew to a store that may have forgotten it."""
        self._epoch = 0

    def accept(self, frame: TokenFrame) -> Delta:
        """The delta that a frame adds (possibly empty). Raises a `GatewayError` where the request failed."""
        delta = Delta(self.index)
        if self.ended or frame.epoch < self._epoch:
            return delta
        self._epoch = frame.epoch
        if frame.usage is not None:
            self.cached_tokens = frame.usage.cached_tokens
        if frame.seq > self.num_tokens:
            self.ended = True
            raise EngineFault("Part of the answer was lost on its way.", code="stream_gap")
        if frame.prompt_logprobs is not None and self.num_tokens == 0:
            delta.prompt_logprobs = frame.prompt_logprobs
        before = self.num_tokens - frame.seq
        if frame.predicted is not None and (before < len(frame.token_ids) or not frame.token_ids):
            self.predicted_right += frame.predicted[0]
            self.predicted_wrong += frame.predicted[1]
        self._read_tokens(frame, delta)
        read = slice(before, self.num_tokens - frame.seq)
        if self._options.token_ids:
            delta.token_ids = frame.token_ids[read]
        if self._options.logprobs and frame.logprobs is not None:
            self._total_logprob += sum(score.logprob for score in frame.logprobs[read])
        if frame.finish is not None and not self.ended:
            self._finish(frame, delta)
        if delta.finish is not None and self._parser is not None:
            delta.pieces += self._parser.finish()
        delta.consumed, delta.total_logprob = self.num_tokens, self._total_logprob
        return delta

    def _read_tokens(self, frame: TokenFrame, delta: Delta) -> None:
        skip = self.num_tokens - frame.seq
        token_ids = frame.token_ids[skip:] if skip else frame.token_ids
        if not token_ids:
            return
        text_ids = token_ids
        if frame.finish is FinishReason.STOP and token_ids[-1] in self._options.end_ids:
            text_ids = token_ids[:-1]
        if self._parser is None and not self._options.logprobs and (len(text_ids) <= 1 or not self._options.stop):
            self.num_tokens += len(token_ids) - len(text_ids)
            self._feed(text_ids, delta)
            return
        scores = frame.logprobs[skip:] if frame.logprobs is not None else None
        for place, token_id in enumerate(text_ids):
            if scores is not None and self._options.logprobs:
                self._held.append(ScoredToken(scores[place], self._text_chars))
            self._feed((token_id,), delta)
            if self._parser is not None and self._parser.reasoning:
                self.reasoning_tokens += 1
            if self.ended:
                return
        self.num_tokens += len(token_ids) - len(text_ids)

    def _feed(self, token_ids: Sequence[int], delta: Delta) -> None:
        self.num_tokens += len(token_ids)
        self._emit(self._detokenizer.feed(token_ids), delta)

    def _emit(self, text: str, delta: Delta) -> None:
        self._text_chars += len(text)
        if self._options.stop and self.num_tokens > self._options.min_tokens:
            text, stopped = self._stops.feed(text)
            if stopped:
                self.ended = self.stopped_by_text = True
                delta.finish, delta.stop_reason = "stop", self._stops.matched
        self._show(text, delta)

    def _show(self, text: str, delta: Delta) -> None:
        delta.text += text
        if self._parser is not None and text:
            delta.pieces += self._parser.feed(text)
        self._release(len(text), delta)

    def _release(self, num_chars: int, delta: Delta) -> None:
        self._sent_chars += num_chars
        while self._held and self._held[0].offset < self._sent_chars:
            delta.tokens.append(self._held.popleft())

    def _finish(self, frame: TokenFrame, delta: Delta) -> None:
        self.ended = True
        check_end(frame)
        if frame.usage is not None:
            self.num_tokens = frame.usage.completion_tokens
            self.prompt_tokens = frame.usage.prompt_tokens
        self._emit(self._detokenizer.flush(), delta)
        if delta.finish is None:
            self._show(self._stops.flush(), delta)
            if self._stops.stopped:
                delta.finish, delta.stop_reason = "stop", self._stops.matched
            else:
                delta.tokens.extend(self._held)
                delta.finish = "length" if frame.finish is FinishReason.LENGTH else "stop"
                if delta.finish == "stop" and frame.token_ids and frame.token_ids[-1] in self._options.stop_ids:
                    delta.stop_reason = frame.token_ids[-1]
        else:
            self.stopped_by_text = False  # the engine is done with it already


def check_end(frame: TokenFrame) -> None:
    """Raises a `GatewayError` where a frame says that its request failed."""
    if frame.finish is FinishReason.ERROR and frame.error_param is not None:
        message = f"Invalid '{frame.error_param}': {frame.error}."
        raise InvalidRequest(message, param=frame.error_param, code="invalid_grammar")
    if frame.finish is FinishReason.ERROR:
        raise EngineFault(frame.error or "The model failed on this request.")
    if frame.finish is FinishReason.EXPIRED:
        raise DeadlineExpired("The request was not done within its deadline.")
    if frame.finish is FinishReason.OVERLOADED:
        message = frame.error or "The server could not begin this request in time. Please try again."
        raise Overloaded(message, retry_after=RETRY_AFTER)
    if frame.finish is FinishReason.CANCELLED:
        raise RequestCancelled(frame.error or "The request was cancelled by the server.")
