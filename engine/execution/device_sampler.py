"""Chooses the next token of every sampling row where the logits lie, as `sampler` does on the CPU: all rows in the same
few operations, no look at a number of theirs, and one transfer of the ids at the end.

A row's choice depends on its own logits, settings and noise alone. Knows no requests and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noria.engine.execution.noise import exponentials_of, keys_of
from noria.engine.execution.sampler import NOT_FINITE, has_filter, logprobs, masks_of, token_logprob
from noria.engine.execution.step import NO_TOKEN, RowOutput, Sampling
from noria.kernels.transfer import to_device

DRAWN_AT_ONCE = 1 << 25
"""Numbers of noise made together: a hundred megabytes or two while they are."""


def sample_on_device(logits: Tensor, rows: Sequence[Sampling], greedy: Tensor | None = None) -> list[RowOutput]:
    """Choose a token for each row of `logits` [R, V] float32, on any device, which is overwritten; see
    `sampler.sample`. `greedy` int64 [2, R] is what `likeliest` gave for these logits, where it was asked already."""
    if not rows:
        return []
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw = dict(zip(wanted, logprobs(logits[wanted].to("cpu")), strict=True)) if wanted else {}
    faults: dict[int, str] = {}
    if all(map(is_plain, rows)):
        found = likeliest(logits) if greedy is None else greedy
    else:
        masked, faults = masks_of(rows)
        found = launch(logits, rows, masked)
    chosen, broken = found.tolist()  # the step's only wait for the device
    faults = {i: (NOT_FINITE, NO_TOKEN)[code - 1] for i, code in enumerate(broken) if code} | faults
    return [
        RowOutput(error=faults[i])
        if i in faults
        else RowOutput((chosen[i],), [token_logprob(raw[i], chosen[i], row.params.logprobs or 0)] if i in raw else None)
        for i, row in enumerate(rows)
    ]


def is_plain(row: Sampling) -> bool:
    """Whether the row takes the likeliest token, whatever came before and whatever may come."""
    params = row.params
    changed = row.history is not None or params.logit_bias or row.banned or row.mask is not None
    return params.temperature <= 0 and not changed


def likeliest(logits: Tensor) -> Tensor:
    """int64 [2, R]: the likeliest token of each row of `logits` [R, V], and 1 for a row with what is no number."""
    return torch.stack((logits.argmax(dim=1), logits.isnan().any(dim=1).long()))


def launch(logits: Tensor, rows: Sequence[Sampling], masked: dict[int, NDArray[np.int32]]) -> Tensor:
    """int64 [2, R]: the chosen tokens, and why a row has none: 1 for logits that are no numbers, 2 for a mask that
    allows nothing. Nothing here waits for the device."""
    broken = logits.isnan().any(dim=1).long()
    _adjust(logits, rows)
    if masked:
        places = _moved(list(masked), torch.int64, logits)
        allowed = _allowed(logits, np.stack(list(masked.values())))
        logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(~allowed, -torch.inf))
        broken.index_copy_(0, places, torch.where(allowed.any(dim=1), broken.index_select(0, places), 2))
    _ban(logits, rows, masked)
    chosen = logits.argmax(dim=1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        places = _moved(drawn, torch.int64, logits)
        chosen.index_copy_(0, places, _draw(logits.index_select(0, places), [rows[i] for i in drawn]))
    return torch.stack((chosen, broken))


def _moved(values: Sequence[float] | Sequence[tuple[int, int]], dtype: torch.dtype, beside: Tensor) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), beside.device)


def _change(logits: Tensor, places: list[NDArray[np.int64]], amounts: list[NDArray[np.float32]], how: _Change) -> None:
    """Some numbers of `logits` [R, V], by their places among all, become how(number, amount). No place comes twice."""
    if places:
        index = to_device(torch.from_numpy(np.concatenate(places)), logits.device)
        amount = to_device(torch.from_numpy(np.concatenate(amounts)), logits.device)
        flat = logits.view(-1)
        flat.index_copy_(0, index, how(flat.index_select(0, index), amount))


_Change = Callable[[Tensor, Tensor], Tensor]


def _adjust(logits: Tensor, rows: Sequence[Sampling]) -> None:
    """Penalties and bias, in place."""
    vocab = logits.shape[1]
    repeated: tuple[list[NDArray[np.int64]], list[NDArray[np.float32]]] = ([], [])
    counted: tuple[list[NDArray[np.int64]], list[NDArray[np.float32]]] = ([], [])
    biased: tuple[list[NDArray[np.int64]], list[NDArray[np.float32]]] = ([], [])
    for i, row in enumerate(rows):
        params = row.params
        if row.history is not None:
            num_prompt, tokens = row.history
            if params.repetition_penalty != 1.0:
                seen = np.unique(np.array(tokens, dtype=np.int64))
                repeated[0].append(seen + i * vocab)
                repeated[1].append(np.full(len(seen), params.repetition_penalty, dtype=np.float32))
            if (params.frequency_penalty or params.presence_penalty) and len(tokens) > num_prompt:
                ids, counts = np.unique(np.array(tokens[num_prompt:], dtype=np.int64), return_counts=True)
                frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
                counted[0].append(ids + i * vocab)
                counted[1].append(counts.astype(np.float32) * frequency + presence)
        if params.logit_bias:
            biased[0].append(np.array(list(params.logit_bias), dtype=np.int64) + i * vocab)
            biased[1].append(np.array(list(params.logit_bias.values()), dtype=np.float32))
    _change(logits, *repeated, lambda values, penalty: torch.where(values > 0, values / penalty, values * penalty))
    _change(logits, *counted, torch.sub)
    _change(logits, *biased, torch.add)


def _allowed(logits: Tensor, words: NDArray[np.int32]) -> Tensor:
    """bool [masked, V] of the bits of `words` [masked, W], lowest first."""
    moved = to_device(torch.from_numpy(words), logits.device)
    bits = torch.bitwise_right_shift(moved[:, :, None], torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    return bits.flatten(1)[:, : logits.shape[1]].bool()


def _ban(logits: Tensor, rows: Sequence[Sampling], masked: dict[int, NDArray[np.int32]]) -> None:
    """In place. Where a mask allows nothing else, a banned token may come."""
    vocab = logits.shape[1]
    for with_mask in (False, True):
        some = [i for i, row in enumerate(rows) if row.banned and (i in masked) == with_mask]
        if not some:
            continue
        before = logits.index_select(0, _moved(some, torch.int64, logits)) if with_mask else None
        flat = [i * vocab + token for i in some for token in rows[i].banned]
        logits.view(-1).index_fill_(0, _moved(flat, torch.int64, logits), -torch.inf)
        if before is not None:
            places = _moved(some, torch.int64, logits)
            after = logits.index_select(0, places)
            nothing = after.amax(dim=1, keepdim=True) == -torch.inf
            logits.index_copy_(0, places, torch.where(nothing, before, after))


def _draw(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """int64 [R]: one draw per row of `logits` [R, V], as `sampler` draws it."""
    temperature = _moved([row.params.temperature for row in rows], torch.float32, logits)
    logits = (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]
    probabilities = torch.softmax(logits, dim=1)
    filtered = [i for i, row in enumerate(rows) if has_filter(row.params)]
    if filtered:
        places = _moved(filtered, torch.int64, logits)
        some = probabilities.index_select(0, places)
        floor = _floors(some, [rows[i] for i in filtered])
        probabilities.index_copy_(0, places, torch.where(some >= floor[:, None], some, 0.0))
    vocab = logits.shape[1]
    at_once = max(1, DRAWN_AT_ONCE // vocab)
    picks = []
    for first in range(0, len(rows), at_once):
        keys = [keys_of(row.params.seed, row.position) for row in rows[first : first + at_once]]
        noise = exponentials_of(_moved(keys, torch.int64, logits), vocab)
        picks.append((probabilities[first : first + at_once] / noise).argmax(dim=1))
    return torch.cat(picks)


def _floors(probabilities: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """The smallest probability [R] that each row's filters keep: min-p, then top-k, then top-p of what is left."""
    vocab = probabilities.shape[1]
    best = torch.sort(probabilities, dim=1, descending=True).values
    floor = best[:, 0] * _moved([row.params.min_p for row in rows], torch.float32, best)
    last = _moved([min(row.params.top_k or vocab, vocab) - 1 for row in rows], torch.int64, best)
    floor = torch.maximum(floor, best.gather(1, last[:, None])[:, 0])
    if all(row.params.top_p >= 1.0 for row in rows):
        return floor
    top_p = _moved([row.params.top_p for row in rows], torch.float64, best)
    kept = torch.where(probabilities >= floor[:, None], probabilities, 0.0)
    mass = kept.sum(dim=1, dtype=torch.float64) * top_p
    reached = torch.searchsorted(torch.cumsum(best, dim=1, dtype=torch.float64), mass[:, None])
    border = best.gather(1, reached.clamp(max=vocab - 1))[:, 0]
    return torch.where(top_p < 1.0, torch.maximum(floor, border), floor)
