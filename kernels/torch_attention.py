"""Ragged paged attention in plain torch, batched where rows allow it: the path of machines without our own kernels.

How a row is computed never depends on its mates: shapes follow from the row alone. Knows no requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import Scores

KEY_BUCKET = 64
"""Decode rows are padded to a multiple of this many keys and batched with rows of the same padded length. A row's
padded length is its own, so the same arithmetic is done for it alone and in any batch. MKL, which torch uses inside,
still rounds by how its buffers are aligned; with MKL_CBWR=AUTO in the process's environment it does not, and then a
decode row has the same bits alone and in any batch. Chunks of a prompt agree to rounding only."""

GATHERED_SLOTS = 2048
"""Keys gathered at a time at most (one row is never cut): what is gathered should still be in cache when attended."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of one padded key length L."""

    rows: Tensor  # int64 [n]: index of each row, which is the index of its only token as well
    slots: Tensor  # int64 [n * L]: slots of the keys; padding repeats the row's last slot, which is its own
    bias: Tensor  # float [n, 1, 1, L]: 0 for keys, -inf for padding


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One prompt, or a chunk of one."""

    start: int  # its tokens are start : end of the flattened batch
    end: int
    slots: Tensor  # int64 [L]: of the keys that any of its queries sees
    visible: Tensor | None  # bool [end - start, L]; None when nothing was computed before: plain causal


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer of a step shares, made once per step. The scratch is written anew by every layer: to allocate
    it per layer costs more than the attention itself, since the system must map the pages each time."""

    decode: list[DecodeGroup]
    prefill: list[PrefillRow]
    gathered_keys: Tensor  # scratch [most slots of a group or row, Hk, D]
    gathered_values: Tensor


def plan_attention(layout: RaggedLayout, pool: Tensor, window: int = 0) -> AttentionPlan:
    """Group the decode rows by padded length and list the slots of every row, for pools like `pool`. A query sees the
    last `window` tokens; 0: all."""
    lengths: list[int] = layout.kv_lens.tolist()
    starts: list[int] = layout.query_start.tolist()
    rows_by_length: dict[int, list[int]] = {}
    for row in range(layout.decode_rows):
        padded = -(-lengths[row] // KEY_BUCKET) * KEY_BUCKET
        rows_by_length.setdefault(padded, []).append(row)
    decode = []
    for padded, rows in rows_by_length.items():
        at_once = max(1, GATHERED_SLOTS // padded)
        decode += [
            _decode_group(layout, rows[first : first + at_once], padded, pool.dtype, window)
            for first in range(0, len(rows), at_once)
        ]
    prefill = [
        _prefill_row(layout, row, starts[row], starts[row + 1], lengths[row], window)
        for row in range(layout.decode_rows, layout.num_rows)
        if starts[row + 1] > starts[row]
    ]
    most_slots = max([len(group.slots) for group in decode] + [len(row.slots) for row in prefill], default=0)
    scratch = (most_slots, *pool.shape[2:])
    return AttentionPlan(decode, prefill, pool.new_empty(scratch), pool.new_empty(scratch))


def ragged_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: AttentionPlan, scores: Scores) -> Tensor:
    """As `reference.ragged_attention`: q [T, Hq, D], pools [num_blocks, block_size, Hk, D] -> [T, Hq, D]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    for group in plan.decode:
        _attend_decode(q, *_gather(k_pool, v_pool, group.slots, plan), group, scores, out)
    for row in plan.prefill:
        _attend_prefill(q, *_gather(k_pool, v_pool, row.slots, plan), row, scores, out)
    return out


def _decode_group(layout: RaggedLayout, rows: list[int], padded: int, dtype: torch.dtype, window: int) -> DecodeGroup:
    index = torch.tensor(rows, dtype=torch.int64)
    positions, lengths = torch.arange(padded), layout.kv_lens[index][:, None]
    is_key = positions[None, :] < lengths  # [n, L]
    if window:
        is_key &= positions[None, :] >= lengths - window
    # Padding repeats the row's last slot, which is its own.
    slots = _slots(layout, index, torch.where(is_key, positions, lengths - 1))
    bias = torch.zeros(len(rows), 1, 1, padded, dtype=dtype).masked_fill_(~is_key[:, None, None, :], float("-inf"))
    return DecodeGroup(index, slots.flatten(), bias)


def _prefill_row(layout: RaggedLayout, row: int, start: int, end: int, length: int, window: int) -> PrefillRow:
    computed = length - (end - start)
    first = max(0, computed - window + 1) if window else 0  # the first key that any query sees
    keys, queries = torch.arange(first, length)[None, :], torch.arange(computed, length)[:, None]
    visible = None
    if computed or length > window > 0:
        visible = keys <= queries
        if window:
            visible &= keys > queries - window
    return PrefillRow(start, end, _slots(layout, torch.tensor([row]), keys).flatten(), visible)


def _slots(layout: RaggedLayout, rows: Tensor, positions: Tensor) -> Tensor:
    """Slots of positions [n, L] of rows [n]: int64 [n, L]."""
    blocks = layout.block_table[rows].long().gather(1, positions // layout.block_size)
    return blocks * layout.block_size + positions % layout.block_size


def _gather(k_pool: Tensor, v_pool: Tensor, slots: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """Keys and values at the slots, in the plan's scratch: two [len(slots), Hk, D]."""
    keys, values = plan.gathered_keys[: len(slots)], plan.gathered_values[: len(slots)]
    torch.index_select(k_pool.flatten(0, 1), 0, slots, out=keys)
    torch.index_select(v_pool.flatten(0, 1), 0, slots, out=values)
    return keys, values


def _attend_decode(q: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scores: Scores, out: Tensor) -> None:
    num_rows, (_, kv_heads, head_dim) = len(group.rows), keys.shape
    # The query heads that share a KV head become query rows, so that nothing is repeated: [n, Hk, Hq / Hk, D].
    queries = q.index_select(0, group.rows).reshape(num_rows, kv_heads, -1, head_dim)
    k, v = (part.reshape(num_rows, -1, kv_heads, head_dim).transpose(1, 2) for part in (keys, values))
    attended = _attended(queries.to(k.dtype), k, v, group.bias, scores)
    out.index_copy_(0, group.rows, attended.flatten(1, 2).to(out.dtype))


def _attend_prefill(q: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, scores: Scores, out: Tensor) -> None:
    _, kv_heads, head_dim = keys.shape
    # KV heads take the batch's place, the query heads that share one are its heads: [Hk, Hq / Hk, n, D].
    queries = q[row.start : row.end].reshape(row.end - row.start, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k, v = (part.transpose(0, 1).unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for part in (keys, values))
    attended = _attended(queries.to(k.dtype), k, v, row.visible, scores)
    out[row.start : row.end] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Without a mask causal, query i seeing key i and those before."""
    if not scores.softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale)
    s = (q @ k.transpose(-1, -2)).mul_(scores.scale / scores.softcap).tanh_().mul_(scores.softcap)
    if mask is None:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril_()
    s = s.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else s.add_(mask)
    return s.softmax(dim=-1) @ v
