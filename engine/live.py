"""A claimed request while this engine works on it: what the wire needs beside what the scheduler knows.

Builds rows for execution and frames for the broker from one and the same record. Knows no tensors and no Redis.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from noria.engine.execution.step import NO_TOKEN, Mask, Pooling, RowInput, RowOutput, Sampling
from noria.engine.grammar.matcher import CompiledGrammar, Matcher
from noria.engine.scheduling.batch import BatchRow, Progress
from noria.engine.scheduling.request import Request
from noria.engine.spans import RequestSpans
from noria.engine.wire.messages import (
    CLASSES,
    Claimed,
    FinishReason,
    GenerationRequest,
    ModelCard,
    TokenFrame,
    TokenLogprob,
    Usage,
)


@dataclass(slots=True)
class LiveRequest:
    """`seq` counts the output tokens already in frames, this engine's and earlier ones'. `pooled` is what the newest
    chunk of a pooled request gave: at its end the vector. A request with a grammar is computed only once it has a
    `matcher`. `is_shown`: this engine has made a frame of it."""

    claimed: Claimed
    scheduled: Request
    seq: int
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    pooled: bytes = b""
    matcher: Matcher | None = None
    is_shown: bool = False
    spans: RequestSpans | None = None

    @staticmethod
    def start(claimed: Claimed, card: ModelCard, scheduler_id: str) -> LiveRequest:
        """Take a claim up where earlier engines left it. The scheduler knows it by an id of this claim alone. Raises
        ValueError for a pooling that there is not."""
        request, params = claimed.request, claimed.request.sampling
        if request.pooling not in (None, "mean", "last"):
            raise ValueError(f"there is no pooling {request.pooling!r}")
        delivered = [token for frame in claimed.delivered for token in frame.token_ids]
        stops = set(params.stop_token_ids)
        # A fulfilled grammar leaves nothing but the end of the sequence, which then ends the request in any case.
        if not params.ignore_eos or params.grammar is not None:
            stops.update(card.eos_token_ids)
        owner = () if request.cache_group else (request.tenant,)
        scheduled = Request(
            id=scheduler_id,
            tokens=[*request.prompt, *delivered],
            num_prompt=len(request.prompt),
            max_tokens=params.max_tokens if request.pooling is None else 0,
            class_rank=CLASSES.index(request.service_class),
            stop_ids=frozenset(stops),
            min_tokens=params.min_tokens if params.grammar is None else 0,
            salt=_salt(request, owner),
            prediction=request.prediction or (),
            # A mean, or the scores of a prompt, need every position computed.
            reuse_prefix=params.prompt_logprobs is None and request.pooling != "mean",
        )
        return LiveRequest(claimed, scheduled, seq=len(delivered))

    def follow(self, grammar: CompiledGrammar) -> None:
        """Let the output match `grammar`, from where it is. Raises GrammarError where it does not already."""
        self.matcher = grammar.matcher(self.scheduled.tokens[self.scheduled.num_prompt :])

    def row(self, row: BatchRow, card: ModelCard) -> RowInput:
        """The control message's row for `row`."""
        request, params = self.scheduled, self.claimed.request.sampling
        end = row.start + row.num_tokens - len(row.draft)
        targets = None
        if params.prompt_logprobs is not None and self.seq == 0 and not row.is_padding:
            targets = request.tokens[row.start + 1 : min(end + 1, request.num_prompt)]
        samplings: list[Sampling] = []
        if row.samples:
            mask = self.matcher.mask(row.draft) if self.matcher is not None else None
            samplings = [self._sampling(card, row.draft[:count], mask) for count in range(len(row.draft) + 1)]
        return RowInput(
            token_ids=[*request.tokens[row.start : end], *row.draft],
            start=row.start,
            blocks=request.blocks,
            sampling=samplings[0] if samplings else None,
            draft=samplings[1:],
            prompt_targets=targets,
            prompt_alternatives=params.prompt_logprobs or 0,
            pooling=self._pooling(row),
            adapter="" if self.claimed.request.adapter is None else self.claimed.request.adapter.digest,
        )

    def _pooling(self, row: BatchRow) -> Pooling | None:
        kind = self.claimed.request.pooling
        is_last = row.start + row.num_tokens == self.scheduled.num_prompt
        if kind is None or row.is_padding or (kind == "last" and not is_last):
            return None
        return Pooling(kind, self.pooled if row.start else b"", is_last)

    def _sampling(self, card: ModelCard, guessed: tuple[int, ...], mask: Mask | None) -> Sampling:
        """How the token after those known, and `guessed` ones after them, is chosen."""
        request, params = self.scheduled, self.claimed.request.sampling
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        banned: tuple[int, ...] = ()
        if request.num_output + len(guessed) < params.min_tokens:
            banned = tuple(request.stop_ids)
        elif params.ignore_eos:
            banned = card.eos_token_ids
        return Sampling(
            params=params,
            position=request.num_tokens + len(guessed),
            history=(request.num_prompt, [*request.tokens, *guessed]) if penalised else None,
            banned=banned,
            mask=mask,
            mask_row=len(guessed),
        )

    def note_prompt(self, row: BatchRow, output: RowOutput) -> None:
        """Keep what a chunk of the prompt gave until the first frame; a prompt read again starts afresh."""
        if output.pooled is not None:
            self.pooled = output.pooled
        if output.prompt_logprobs is None:
            return
        if row.start == 0:
            self.prompt_logprobs = [None]
        self.prompt_logprobs.extend(output.prompt_logprobs)

    def note_output(self, progress: Progress) -> None:
        """Follow the grammar over what was kept of the iteration's tokens."""
        if self.matcher is not None and progress.finish is None:
            self.matcher.accept(progress.new_tokens)

    def frame(self, progress: Progress, logprobs: list[TokenLogprob] | None, error: str | None = None) -> TokenFrame:
        """The frame that tells the gateway of `progress`."""
        request = self.scheduled
        first = self.seq == 0
        finish = FinishReason(progress.finish) if progress.finish else None
        embedding = None
        if finish is FinishReason.LENGTH and self.claimed.request.pooling is not None:
            finish, embedding = FinishReason.STOP, self.pooled
        grammar = self.claimed.request.sampling.grammar
        frame = TokenFrame(
            request_id=self.claimed.request.id,
            epoch=self.claimed.epoch,
            seq=self.seq,
            token_ids=list(progress.new_tokens),
            logprobs=logprobs[: len(progress.new_tokens)] if logprobs and progress.new_tokens else None,
            finish=finish,
            usage=Usage(request.num_prompt, request.num_output, request.num_cached)
            if progress.finish or (request.num_cached and not self.is_shown)
            else None,
            error=error,
            error_param=grammar.param if grammar is not None and error == NO_TOKEN else None,
            prompt_logprobs=(self.prompt_logprobs or None) if first else None,
            embedding=embedding,
            predicted=request.drafter.take_predicted() if request.drafter is not None else None,
        )
        self.seq += len(progress.new_tokens)
        self.is_shown = True
        return frame


def _salt(request: GenerationRequest, owner: tuple[str, ...]) -> bytes:
    """What keeps a prefix of the request apart: from those whom it may not share with, and from keys and values that
    another adapter, or none, has made of the same tokens."""
    whose = (request.cache_salt, request.cache_group, *owner)
    return msgspec.msgpack.encode(whose if request.adapter is None else (whose, request.adapter.digest))
