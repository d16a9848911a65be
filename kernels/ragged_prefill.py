"""Attention of prompt rows in Triton: many query tokens a row, in tiles tall enough for the tensor cores.

Tiles of keys lie at fixed places from a row's first token, so a query's bits do not depend on how its prompt is cut.
Knows no decode rows (`ragged_decode.py`), requests or models.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from noria.kernels.attention_tile import attend_tile
from noria.kernels.configs import Tile


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    q,  # [T, Hq, D], a token's heads side by side
    k_pool,  # [blocks, PAGE, Hk, D]
    v_pool,
    block_table,  # int32 [R, table_stride]
    query_start,  # int32 [R + 1]
    kv_lens,  # int32 [R]
    tiles,  # int32 [N, 2]: row, and its first query that the tile takes
    out,  # [T, Hq, D]
    q_stride,
    table_stride,
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
    UPCAST: tl.constexpr,
):
    """Grid (N, Hk). A tile's rows are queries times the query heads that share a KV head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    row_start = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - row_start
    kv_len = tl.load(kv_lens + row)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries_at_once: tl.constexpr = BLOCK_M // GROUP
    query = first + members // GROUP
    there = ((members < queries_at_once * GROUP) & (query < num_queries))[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (row_start + query).to(tl.int64)
    heads = kv_head * GROUP + members % GROUP
    loaded = tl.load(q + (tokens * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :], mask=there, other=0.0)
    if UPCAST:
        loaded = loaded.to(tl.float32)
    computed = kv_len - num_queries  # tokens of the row before its first query
    positions = computed + query
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    pages = block_table + row.to(tl.int64) * table_stride
    k_head, v_head = k_pool + kv_head * HEAD_DIM, v_pool + kv_head * HEAD_DIM
    end = tl.minimum(computed + first + queries_at_once, kv_len)
    first_key = tl.maximum(computed + first - WINDOW + 1, 0) if WINDOW > 0 else 0
    if WINDOW > 0:
        diagonal = first_key // BLOCK_N * BLOCK_N
    else:
        # Keys that all queries of the tile see.
        diagonal = (computed + first + 1) // BLOCK_N * BLOCK_N
        for start in range(0, diagonal, BLOCK_N):
            acc, highest, total = attend_tile(
                loaded,
                acc,
                highest,
                total,
                k_head,
                v_head,
                pages,
                start,
                first_key,
                kv_len,
                positions,
                scale,
                False,
                WINDOW,
                SOFTCAP,
                PAGE,
                KV_HEADS,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_N,
            )
    for start in range(diagonal, end, BLOCK_N):
        acc, highest, total = attend_tile(
            loaded,
            acc,
            highest,
            total,
            k_head,
            v_head,
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
    place = out + ((tokens * (KV_HEADS * GROUP) + heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Prompt rows of a step, on the device."""

    block_table: Tensor  # int32 [R, blocks]
    query_start: Tensor  # int32 [R + 1]
    kv_lens: Tensor  # int32 [R]
    tiles: Tensor  # int32 [N, 2], of `prefill_tiles`


def prefill_tiles(
    query_start: Sequence[int], kv_lens: Sequence[int], first_row: int, queries_at_once: int
) -> list[tuple[int, int]]:
    """(row, first query) of every tile of the rows from `first_row` on; those with the most keys to read come first."""
    tiles = [
        (row, first)
        for row in range(first_row, len(kv_lens))
        for first in range(0, query_start[row + 1] - query_start[row], queries_at_once)
    ]
    tiles.sort(key=lambda tile: query_start[tile[0] + 1] - query_start[tile[0]] - kv_lens[tile[0]] - tile[1])
    return tiles


def prefill_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: PrefillRows,
    out: Tensor,
    scale: float,
    tile: Tile,
    *,
    window: int = 0,
    softcap: float = 0.0,
    upcast: bool = False,
) -> None:
    """Causal attention of the tokens of q [T, Hq, D] that the tiles name, into the same places of `out`.

    Options as in `ragged_decode.decode_attention`. `tiles` must have been cut for `tile.queries_at_once(Hq / Hk)`.
    """
    _, page, kv_heads, head_dim = k_pool.shape
    prefill_kernel[(len(rows.tiles), kv_heads)](
        q,
        k_pool,
        v_pool,
        rows.block_table,
        rows.query_start,
        rows.kv_lens,
        rows.tiles,
        out,
        q.stride(0),
        rows.block_table.stride(0),
        scale,
        WINDOW=window,
        SOFTCAP=softcap,
        PAGE=page,
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        UPCAST=upcast,
        **tile.options,
    )
