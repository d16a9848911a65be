"""The operations in plain torch, written to be read: the oracle that every fast path is tested against.

Slow on purpose (a loop per row, no batching). Knows nothing of requests, models or devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noria.kernels.layout import RaggedLayout


def row_slots(layout: RaggedLayout, row: int) -> Tensor:
    """Slots of the row's tokens 0 .. kv_len - 1, in order: int64 [kv_len]. Touches the row's own blocks only."""
    positions = torch.arange(int(layout.kv_lens[row]))
    blocks = layout.block_table[row].long()[positions // layout.block_size]
    return blocks * layout.block_size + positions % layout.block_size


def ragged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    layout: RaggedLayout,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Causal attention of T query tokens over their rows' paged keys and values.

    q [T, Hq, D]; pools [num_blocks, block_size, Hk, D] with this step's tokens already written; query head h reads
    KV head h // (Hq / Hk). A row's last query is its token kv_len - 1. A query sees the last `window` tokens up to its
    own, all of them with 0; scores s become softcap * tanh(s / softcap) where that is not 0 (Gemma 2). `dtype` is the
    precision of the arithmetic (default: q's own); the result [T, Hq, D] has q's dtype, or `dtype` where given.
    """
    precision = dtype or q.dtype
    out = torch.zeros(q.shape, dtype=precision)
    group = q.shape[1] // k_pool.shape[2]
    starts: list[int] = layout.query_start.tolist()
    for row in range(layout.num_rows):
        queries = q[starts[row] : starts[row + 1]].to(precision)  # [n, Hq, D]
        slots = row_slots(layout, row)
        keys = k_pool.flatten(0, 1)[slots].to(precision).repeat_interleave(group, dim=1)  # [kv_len, Hq, D]
        values = v_pool.flatten(0, 1)[slots].to(precision).repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,lhd->hnl", queries, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query_positions = torch.arange(len(slots) - len(queries), len(slots))[:, None]
        hidden = torch.arange(len(slots))[None, :] > query_positions  # [n, kv_len]: keys of the future
        if window:
            hidden |= torch.arange(len(slots))[None, :] <= query_positions - window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out[starts[row] : starts[row + 1]] = torch.einsum("hnl,lhd->nhd", weights, values)
    return out


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T, Hk, D] at their slots [T] of the pools, in place."""
    for token, slot in enumerate(slot_mapping.tolist()):
        k_pool.flatten(0, 1)[slot] = k[token]
        v_pool.flatten(0, 1)[slot] = v[token]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-rotation order: pairs are (i, i + D / 2). x [T, H, D]; cos, sin [T, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight, per row of x [T, C] (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with gate_up [T, 2F] = gate beside up; returns [T, F] (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, C] times the transpose of weight [O, C], plus bias [O]."""
    product = x @ weight.t()
    return product if bias is None else product + bias
