"""Attention of decode rows in Triton: one query token a row, the keys cut into splits that run side by side.

A split has a fixed size, not a fixed count, and splits are merged in order: what a row computes never depends on its
mates. Knows no prefill rows (`ragged_prefill.py`), requests or models.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from noria.kernels.attention_tile import attend_tile
from noria.kernels.configs import Tile

SPLIT = 512
"""Keys of a split: enough work to pay for a program, few enough that one long row fills a GPU."""

VARYING = ["table_stride", "num_splits"]
"""Arguments that differ from batch to batch: compiled code must not depend on their values."""


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    q,  # [T, Hq, D], a token's heads side by side
    k_pool,  # [blocks, PAGE, Hk, D]
    v_pool,
    block_table,  # int32 [R, table_stride]
    kv_lens,  # int32 [R]; 0: a padding row, which touches nothing
    out,  # [T, Hq, D]
    partial,  # float32 [R, Hq, num_splits, D]: weighted values of a split
    partial_max,  # float32 [R, Hq, num_splits]
    partial_sum,
    q_stride,
    table_stride,
    num_splits,
    scale,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (R, Hk, num_splits). The query heads that share a KV head are the rows of one tile."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens + row)
    first_key = tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0
    end = tl.minimum((split + 1) * SPLIT, kv_len)
    if (split * SPLIT >= kv_len) | (end <= first_key):
        return
    token = row.to(tl.int64)  # decode rows come first and have one token each
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    there = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + token * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=there, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    positions = tl.zeros([BLOCK_M], tl.int32) + (kv_len - 1)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    pages = block_table + token * table_stride
    # Tiles lie at multiples of their size from the row's first token, wherever a window begins.
    begin = tl.maximum(split * SPLIT, first_key // BLOCK_N * BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        acc, highest, total = attend_tile(
            queries,
            acc,
            highest,
            total,
            k_pool + kv_head * HEAD_DIM,
            v_pool + kv_head * HEAD_DIM,
            pages,
            start,
            first_key,
            kv_len,
            positions,
            scale,
            True,
            WINDOW,
            SOFTCAP,
            PAGE,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
        )
    if first_key // SPLIT == (kv_len - 1) // SPLIT:  # the row's only split that has keys
        place = out + (token * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)
    else:
        slots = (token * (KV_HEADS * GROUP) + heads) * num_splits + split
        tl.store(partial + slots[:, None] * HEAD_DIM + dims[None, :], acc, mask=there)
        tl.store(partial_max + slots, highest, mask=members < GROUP)
        tl.store(partial_sum + slots, total, mask=members < GROUP)


@triton.jit(do_not_specialize=VARYING[1:])
def merge_kernel(
    partial,
    partial_max,
    partial_sum,
    kv_lens,
    out,
    num_splits,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (R, Hq): the splits of one head of one row, in order. Reads those that have keys and no others."""
    row = tl.program_id(0)
    kv_len = tl.load(kv_lens + row)
    first = (tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0) // SPLIT
    last = (kv_len - 1) // SPLIT
    if (kv_len == 0) | (first == last):
        return
    head = row.to(tl.int64) * NUM_HEADS + tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    highest = tl.load(partial_max + head * num_splits + first)
    total = highest * 0.0
    for split in range(first, last + 1):
        slot = head * num_splits + split
        top = tl.load(partial_max + slot)
        now = tl.maximum(highest, top)
        fade, weight = tl.exp2(highest - now), tl.exp2(top - now)
        values = tl.load(partial + slot * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        acc = acc * fade + values * weight
        total = total * fade + tl.load(partial_sum + slot) * weight
        highest = now
    tl.store(out + head * HEAD_DIM + dims, (acc / total).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows of a step, on the device. The partial results are written anew by every layer."""

    num_rows: int  # R; what the tensors hold beyond these rows is not looked at
    block_table: Tensor  # int32 [>= R, blocks]
    kv_lens: Tensor  # int32 [>= R]
    partial: Tensor  # float32 [R, Hq, splits, D]
    partial_max: Tensor  # float32 [R, Hq, splits]
    partial_sum: Tensor
    split: int

    @staticmethod
    def build(
        num_rows: int, block_table: Tensor, kv_lens: Tensor, longest: int, heads: tuple[int, int], split: int = SPLIT
    ) -> DecodeRows:
        """Rows of up to `longest` keys, for `heads` = (Hq, D); `split` is a multiple of every tile's width."""
        num_heads, head_dim = heads
        shape = (num_rows, num_heads, max(1, -(-longest // split)))
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=kv_lens.device)
        return DecodeRows(
            num_rows, block_table, kv_lens, partial, partial.new_empty(shape), partial.new_empty(shape), split
        )


def decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: DecodeRows,
    out: Tensor,
    scale: float,
    tile: Tile,
    *,
    window: int = 0,
    softcap: float = 0.0,
    upcast: bool = False,
) -> None:
    """Attention of the first R tokens of q [T, Hq, D] over their rows' keys and values, into the first R of `out`.

    Pools [blocks, block size, Hk, D]. A query sees the last `window` keys, all with 0; scores s become softcap *
    tanh(s / softcap) where that is not 0. `upcast` computes in float32 whatever q is. A split without keys is skipped.
    """
    _, page, kv_heads, head_dim = k_pool.shape
    num_heads, num_splits = q.shape[1], rows.partial_max.shape[2]
    block_d = triton.next_power_of_2(head_dim)
    partials = (rows.partial, rows.partial_max, rows.partial_sum)
    decode_kernel[(rows.num_rows, kv_heads, num_splits)](
        q,
        k_pool,
        v_pool,
        rows.block_table,
        rows.kv_lens,
        out,
        *partials,
        q.stride(0),
        rows.block_table.stride(0),
        num_splits,
        scale,
        WINDOW=window,
        SOFTCAP=softcap,
        PAGE=page,
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SPLIT=rows.split,
        UPCAST=upcast,
        **tile.options,
    )
    if num_splits > 1:
        merge_kernel[(rows.num_rows, num_heads)](
            *partials,
            rows.kv_lens,
            out,
            num_splits,
            WINDOW=window,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SPLIT=rows.split,
            num_warps=1,
            enable_fp_fusion=True,
        )
