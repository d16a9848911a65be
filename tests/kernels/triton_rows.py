"""Runs the attention kernels on rows given as numbers: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from noria.kernels import reference
from noria.kernels.configs import Tile
from noria.kernels.layout import RaggedLayout
from noria.kernels.ragged_decode import DecodeRows, decode_attention
from noria.kernels.ragged_prefill import PrefillRows, prefill_attention, prefill_tiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def attend(
    q: Tensor,
    pools: list[Tensor],
    layout: RaggedLayout,
    *,
    decode: Tile,
    prefill: Tile,
    split: int,
    window: int = 0,
    softcap: float = 0.0,
    upcast: bool = False,
) -> Tensor:
    """Attention of q [T, Hq, D] over pools [blocks, block size, Hk, D] by both kernels, scale D ** -0.5. What they read
    and write is set to NaN first."""
    (_, num_heads, dim), group = q.shape, q.shape[1] // pools[0].shape[2]
    lengths, starts = layout.kv_lens.tolist(), layout.query_start.tolist()
    k_pool, v_pool = (pool.to(DEVICE) for pool in pools)
    table, kv_lens = layout.block_table.to(DEVICE), layout.kv_lens.to(DEVICE)
    queries, out = q.to(DEVICE), torch.full_like(q, float("nan"), device=DEVICE)
    if layout.decode_rows:
        longest = max(lengths[: layout.decode_rows])
        rows = DecodeRows.build(layout.decode_rows, table, kv_lens, longest, (num_heads, dim), split)
        for scratch in (rows.partial, rows.partial_max, rows.partial_sum):
            scratch.fill_(float("nan"))
        decode_attention(
            queries, k_pool, v_pool, rows, out, dim**-0.5, decode, window=window, softcap=softcap, upcast=upcast
        )
    tiles = prefill_tiles(starts, lengths, layout.decode_rows, prefill.queries_at_once(group))
    if tiles:
        on_device = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
        prompts = PrefillRows(table, layout.query_start.to(DEVICE), kv_lens, on_device)
        prefill_attention(
            queries, k_pool, v_pool, prompts, out, dim**-0.5, prefill, window=window, softcap=softcap, upcast=upcast
        )
    return out.cpu()


def expected(q: Tensor, pools: list[Tensor], layout: RaggedLayout, window: int = 0, softcap: float = 0.0) -> Tensor:
    """The same in float64."""
    return reference.ragged_attention(
        q, *pools, layout, q.shape[2] ** -0.5, window=window, softcap=softcap, dtype=torch.float64
    )
