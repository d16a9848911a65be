"""y = x W^T in Triton with one tile for every size of batch: a token's bits do not depend on who is computed with it.

A persistent grid walks over the tiles; each adds its products along K in one order. Slower than torch's product, which
picks its method by the number of tokens. Knows no requests or models.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from noria.kernels.configs import LinearTile


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x,  # [num_tokens, IN]
    weight,  # [OUT, IN]
    bias,  # [OUT], where BIASED
    out,  # [num_tokens, OUT]
    num_tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Any grid (P,): program p takes tiles p, p + P, …; those that share columns of the weight follow one another."""
    tall = tl.cdiv(num_tokens, BLOCK_M)
    for tile in range(tl.program_id(0), tall * tl.cdiv(OUT, BLOCK_N), tl.num_programs(0)):
        tokens = (tile % tall) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tile // tall) * BLOCK_N + tl.arange(0, BLOCK_N)
        # What lies beyond the end is read from the beginning and thrown away: no mask within the loop.
        x_rows = x + (tokens % num_tokens).to(tl.int64)[:, None] * IN
        w_rows = weight + (columns % OUT).to(tl.int64)[:, None] * IN
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, IN, BLOCK_K):
            inputs = start + tl.arange(0, BLOCK_K)
            if IN % BLOCK_K == 0:
                a, b = tl.load(x_rows + inputs[None, :]), tl.load(w_rows + inputs[None, :])
            else:
                inside = (inputs < IN)[None, :]
                a = tl.load(x_rows + inputs[None, :], mask=inside, other=0.0)
                b = tl.load(w_rows + inputs[None, :], mask=inside, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="tf32x3")
        if BIASED:
            acc += tl.load(bias + columns % OUT).to(tl.float32)[None, :]
        place = out + tokens.to(tl.int64)[:, None] * OUT + columns[None, :]
        there = (tokens < num_tokens)[:, None] & (columns < OUT)[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=there)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile, programs: int) -> Tensor:
    """x [T, C] times the transpose of weight [O, C], plus bias [O] -> [T, O] of x's type.

    `programs` is how many run at once, as many as the device has multiprocessors: it decides who computes a tile, not
    how.
    """
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if len(x):
        tiles = triton.cdiv(len(x), tile.block_m) * triton.cdiv(len(weight), tile.block_n)
        linear_kernel[(min(programs, tiles),)](
            x.contiguous(),
            weight,
            weight if bias is None else bias,
            out,
            len(x),
            IN=x.shape[1],
            OUT=len(weight),
            BIASED=bias is not None,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            **tile.options,
        )
    return out
