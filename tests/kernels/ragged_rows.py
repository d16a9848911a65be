"""Random rows for tests of the kernels: their blocks are shuffled, and what belongs to no row is NaN."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

BLOCK_SIZE = 16


def make_rows(lengths: list[tuple[int, int]], spare_blocks: int = 3) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Rows of (computed, new) with shuffled blocks of their own, and the number of blocks in the pool."""
    needed = [-(-(computed + new) // BLOCK_SIZE) for computed, new in lengths]
    num_blocks = sum(needed) + spare_blocks
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks)).tolist()
    rows = []
    for (computed, new), count in zip(lengths, needed, strict=True):
        rows.append((computed, new, [order.pop() for _ in range(count)]))
    return rows, num_blocks


def poisoned_pools(rows: list[tuple[int, int, list[int]]], num_blocks: int, heads: int, dim: int) -> list[Tensor]:
    """K and V pools that hold numbers where a row has tokens and NaN everywhere else."""
    pools = []
    for seed in (1, 2):
        pool = torch.full((num_blocks, BLOCK_SIZE, heads, dim), float("nan"))
        generator = torch.Generator().manual_seed(seed)
        for computed, new, blocks in rows:
            for position in range(computed + new):
                slot = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
                pool[slot] = torch.randn(heads, dim, generator=generator)
        pools.append(pool)
    return pools


@st.composite
def ragged_lengths(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Decode rows (one new token each), then prefill rows with or without a computed prefix."""
    decode = draw(st.lists(st.integers(0, 150).map(lambda computed: (computed, 1)), max_size=5))
    prefill = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 70)), max_size=4))
    return decode + prefill, len(decode)
