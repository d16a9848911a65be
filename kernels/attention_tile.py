"""One tile of paged attention in Triton: a block of queries meets a block of keys, with an online softmax.

The inner step of both `ragged_decode.py` and `ragged_prefill.py`. Knows one row's pages; not rows, grids or phases.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_tile(
    q,  # [BLOCK_M, BLOCK_D]
    acc,  # float32 [BLOCK_M, BLOCK_D]: weighted values so far
    highest,  # float32 [BLOCK_M]: largest score so far, in powers of two
    total,  # float32 [BLOCK_M]: sum of the weights so far
    k_pool,  # pointers to the KV head's part of slot 0
    v_pool,
    pages,  # pointer to the row's part of the block table
    start,  # position of the first key of the tile
    first_key,  # position of the first key that any query of the block sees: a window's pages before it may be free
    kv_len,
    positions,  # int32 [BLOCK_M]: position of each query; it sees keys up to there
    scale,
    MASKED: tl.constexpr,  # False: every query sees every key of the tile
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`acc`, `highest` and `total` with the tile's keys taken in."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    inside = (keys < kv_len) if MASKED else (keys >= 0)
    if WINDOW > 0:
        inside = inside & (keys >= first_key)
    page = tl.load(pages + keys // PAGE, mask=inside, other=0).to(tl.int64)  # a pool may have more than 2 ** 31 numbers
    offsets = ((page * PAGE + keys % PAGE) * (KV_HEADS * HEAD_DIM))[:, None] + dims[None, :]
    if MASKED or BLOCK_D != HEAD_DIM:
        # Free slots may hold anything, and a weight of zero times NaN is NaN: values are masked as well as scores.
        there = inside[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_pool + offsets, mask=there, other=0.0).to(q.dtype)
        v = tl.load(v_pool + offsets, mask=there, other=0.0).to(q.dtype)
    else:
        k = tl.load(k_pool + offsets).to(q.dtype)
        v = tl.load(v_pool + offsets).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if SOFTCAP > 0:
        capped = scores * (scale / SOFTCAP)
        decay = tl.exp2(tl.abs(capped) * (-2.0 * LOG2E))  # tanh by a power that cannot overflow
        tanh = (1.0 - decay) / (1.0 + decay)
        scores = tl.where(capped < 0, -tanh, tanh) * (SOFTCAP * LOG2E)
    else:
        scores = scores * (scale * LOG2E)
    if MASKED:
        visible = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    now = tl.maximum(highest, tl.max(scores, 1))
    # A query that has seen no key yet keeps -inf; subtracting that from itself would be NaN.
    base = tl.where(now == float("-inf"), 0.0, now) if MASKED else now
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(highest - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None], input_precision="tf32x3")
    return acc, now, total
