"""The paged KV cache as tensors. Its layout is private to the operations that made it.

Knows no requests or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPools:
    """Per layer one pool of keys and one of values, for `num_blocks` blocks of `block_size` tokens each. Layers of
    different groups may share theirs, since they have blocks of their own there."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[int, ...] = ()  # of each layer, where there is more than one

    def for_layers(self, places: Sequence[int], groups: Sequence[int]) -> Self:
        """The pools of layers that lie at `places` of these and belong to `groups`."""
        if not any(groups):
            return self
        keys, values = ([pools[place] for place in places] for pools in (self.keys, self.values))
        return replace(self, keys=keys, values=values, groups=tuple(groups))

    def group_of(self, layer: int) -> int:
        return self.groups[layer] if self.groups else 0


def kv_bytes_per_block(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of one block over all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
