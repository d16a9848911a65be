"""The paged KV cache as tensors. Its layout is private to the operations that made it.

Knows no requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPools:
    """Per layer one pool of keys and one of values, for `num_blocks` blocks of `block_size` tokens each."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int
    num_kv_heads: int
    head_dim: int


def kv_bytes_per_block(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of one block over all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
