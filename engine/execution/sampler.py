"""Chooses the next token of every sampling row in one pass over the batch.

A row's choice depends on its own logits, settings and noise alone. Knows no requests and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noria.engine.execution.noise import exponentials
from noria.engine.execution.step import NO_TOKEN, NoMask, RowOutput, Sampling
from noria.engine.wire.messages import SamplingParams, TokenLogprob

NOT_FINITE = "the model's logits are not finite"
"""The error of a row whose logits are no numbers."""

CANDIDATES = 256
"""Largest probabilities looked at before a whole row is sorted: top-p rarely needs more of them."""


def sample(logits: Tensor, rows: Sequence[Sampling]) -> list[RowOutput]:
    """Choose a token for each row of `logits` [R, V] float32, which is overwritten.

    Order as in vLLM and transformers: repetition, frequency and presence penalties, logit bias, the grammar's mask,
    banned tokens, then greedy where the temperature is 0, else temperature, min-p, top-k, top-p and one draw. A row
    whose logits are not numbers, or whose grammar allows no token, gives an output with `error` and disturbs no other.
    """
    if not rows:
        return []
    faults = dict.fromkeys(_rows_with_nan(logits), NOT_FINITE)
    raw = {i: logprobs(logits[i]) for i, row in enumerate(rows) if row.params.logprobs is not None and i not in faults}
    for i, row in enumerate(rows):
        _adjust(logits[i], row)
    faults |= _restrict(logits, rows)
    chosen: list[int] = logits.numpy().argmax(axis=1).tolist()
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0 and i not in faults]
    if drawn:
        picks = _draw(logits[drawn], [rows[i] for i in drawn])
        for i, token in zip(drawn, picks, strict=True):
            chosen[i] = token
    return [
        RowOutput(error=faults[i])
        if i in faults
        else RowOutput((chosen[i],), [token_logprob(raw[i], chosen[i], row.params.logprobs or 0)] if i in raw else None)
        for i, row in enumerate(rows)
    ]


def _rows_with_nan(logits: Tensor) -> list[int]:
    """Numpy finds a row's first NaN for its largest number, at ten times the speed of asking torch for either."""
    table = logits.numpy()
    largest = table[np.arange(len(table)), table.argmax(axis=1)]
    places: list[int] = np.flatnonzero(np.isnan(largest)).tolist()
    return places


def logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities [..., V] under the model's own distribution: before bias, penalties and temperature, as
    OpenAI and vLLM report them."""
    return torch.log_softmax(logits.float(), dim=-1)


def token_logprob(row: Tensor, token: int, alternatives: int) -> TokenLogprob:
    """The entry of `token` in a row of log-probabilities [V], with its rank and its best alternatives."""
    top: list[tuple[int, float]] = []
    if alternatives:
        values, ids = torch.topk(row, min(alternatives, row.shape[0]))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(row[token]), top, rank=1 + int((row > row[token]).sum()))


def _adjust(logits: Tensor, row: Sampling) -> None:
    """Apply penalties and bias to one row [V] in place; free for rows that have none."""
    params = row.params
    if row.history is not None:
        num_prompt, tokens = row.history
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(tokens)), dtype=torch.int64)
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if (params.frequency_penalty or params.presence_penalty) and len(tokens) > num_prompt:
            ids, counts = torch.unique(torch.tensor(tokens[num_prompt:], dtype=torch.int64), return_counts=True)
            logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)


def _restrict(logits: Tensor, rows: Sequence[Sampling]) -> dict[int, str]:
    """Take away in place what a row [V] may not choose; returns what is wrong with rows that have nothing left. Banned
    tokens come after all where the grammar allows nothing else: a fulfilled grammar ends its request whatever
    `min_tokens` and `ignore_eos` say."""
    masked, faults = masks_of(rows)
    if masked:
        words = torch.from_numpy(np.stack(list(masked.values())))  # int32 [masked, W]
        bits = torch.bitwise_right_shift(words[:, :, None], torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
        for place, (i, some) in enumerate(zip(masked, allowed.any(dim=1).tolist(), strict=True)):
            logits[i].masked_fill_(~allowed[place], -torch.inf)
            if not some:
                faults[i] = NO_TOKEN
    free = [(i, token) for i, row in enumerate(rows) if i not in masked for token in row.banned]
    if free:
        # All rows at once, by numpy: for each, or by torch, it took longer than the choice.
        logits.numpy()[tuple(np.array(free).T)] = -np.inf
    for i in masked:
        if rows[i].banned:
            banned = list(rows[i].banned)
            kept = logits[i, banned]
            logits[i, banned] = -torch.inf
            if logits[i].amax() == -torch.inf:
                logits[i, banned] = kept
    return faults


def masks_of(rows: Sequence[Sampling]) -> tuple[dict[int, NDArray[np.int32]], dict[int, str]]:
    """The masks by row, and what is wrong with rows that should have one."""
    masked, faults = {}, {}
    for i, row in enumerate(rows):
        if row.mask is not None:
            try:
                masked[i] = row.mask.words()[row.mask_row]
            except NoMask as error:
                faults[i] = str(error)
    return masked, faults


def _draw(logits: Tensor, rows: Sequence[Sampling]) -> list[int]:
    """One draw per row of `logits` [R, V]: the token whose exponential draw, divided by its probability, is smallest
    (the Gumbel-max trick). Inverting the distribution function would need one number a row instead of one a token, but
    there the rounding of every earlier token moves a token's place: after a batch mate, another chunk or another
    engine has changed last bits, draws from the long tail would come out different. Here the two best must be as close
    as the rounding."""
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32)
    # The maximum is taken out before the division, so that a tiny temperature cannot overflow.
    logits = (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]
    probabilities = torch.softmax(logits, dim=1)
    filtered = [i for i, row in enumerate(rows) if has_filter(row.params)]
    if filtered:
        floor = _floors(probabilities[filtered], [rows[i].params for i in filtered])
        kept = probabilities[filtered]
        probabilities[filtered] = torch.where(kept >= floor[:, None], kept, 0.0)
    vocab = logits.shape[1]
    return [
        int(torch.argmax(row_probabilities / exponentials(row.params.seed, row.position, vocab)))
        for row_probabilities, row in zip(probabilities, rows, strict=True)
    ]


def has_filter(params: SamplingParams) -> bool:
    """Whether some tokens are left out before the draw."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _floors(probabilities: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """The smallest probability [R] that each row's filters keep: min-p, then top-k, then top-p of what is left.
    Equal probabilities at the border are kept or dropped together."""
    vocab = probabilities.shape[1]
    width = min(vocab, max([CANDIDATES, *(row.top_k for row in rows)]))
    best = torch.topk(probabilities, width, dim=1).values
    return torch.stack([_floor(p, b, row) for p, b, row in zip(probabilities, best, rows, strict=True)])


def _floor(probabilities: Tensor, best: Tensor, params: SamplingParams) -> Tensor:
    """The floor of one row: `probabilities` [V], `best` [K] its largest ones, best first."""
    floor = best[0] * params.min_p
    if params.top_k > 0:
        floor = torch.maximum(floor, best[min(params.top_k, best.shape[0]) - 1])
    if params.top_p >= 1.0:
        return floor
    mass = torch.where(probabilities >= floor, probabilities, 0.0).sum(dtype=torch.float64) * params.top_p
    if best.sum(dtype=torch.float64) < mass:
        best = torch.sort(probabilities, descending=True).values
    reached = torch.searchsorted(torch.cumsum(best, dim=0, dtype=torch.float64), mass)
    return torch.maximum(floor, best[min(int(reached), best.shape[0] - 1)])
