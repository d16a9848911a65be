"""The integers of a step of decode rows at fixed places on the device, so that what is launched over them can be
launched again with others.

Knows where they lie and how a step fills them; nothing of requests, models or graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import Scores
from noria.kernels.pools import KVPools


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """For up to N rows of up to `longest` tokens. Rows that a step does not use are padding: of no token, with a slot
    of -1, and so they touch no page. All int32; everything lies in one piece, and is moved in one."""

    on_host: Tensor
    on_device: Tensor
    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    kv_lens: Tensor  # [N]
    slots: list[Tensor]  # [N], for each group of layers
    tables: list[Tensor]  # [N, W], likewise
    longest: int

    @staticmethod
    def build(num_rows: int, longest: int, block_size: int, device: torch.device, num_groups: int = 1) -> DecodeBuffers:
        width = -(-longest // block_size)
        host = torch.empty(_size(num_rows, width, num_groups), dtype=torch.int32, pin_memory=device.type == "cuda")
        moved = torch.empty_like(host, device=device)
        token_ids, positions, kv_lens, slots, tables = _cut(moved, num_rows, width, num_groups)
        return DecodeBuffers(host, moved, token_ids, positions, kv_lens, slots, tables, longest)

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)

    def fill(self, token_ids: Tensor, positions: Tensor, layout: RaggedLayout) -> None:
        """Take over a step of R <= N decode rows, each of `longest` tokens at most. The step before must be through."""
        rows, (width, groups) = layout.num_rows, (self.tables[0].shape[1], len(self.tables))
        ids, places, lengths, slots, tables = _cut(self.on_host, self.num_rows, width, groups)
        self.on_host.zero_()
        ids[:rows], places[:rows], lengths[:rows] = token_ids, positions, layout.kv_lens
        for group in range(groups):
            own = layout.of(group)
            slots[group].fill_(-1)
            slots[group][:rows] = own.slot_mapping
            tables[group][:rows, : own.block_table.shape[1]] = own.block_table
        self.on_device.copy_(self.on_host, non_blocking=True)


class DecodePlanner(Protocol):
    """Operations whose launches over fixed places can be repeated: they ask the host nothing in between."""

    def plan_decode(
        self, rows: DecodeBuffers, group: int, angles: Tensor, kv: KVPools, num_heads: int, scores: Scores
    ) -> Any:
        """See `Ops.plan_step`; for whatever the buffers hold when the layers run. `angles` reach to `rows.longest`."""


def _aligned(count: int) -> int:
    """Each part begins at a multiple of 16 bytes: compiled kernels are for pointers that do."""
    return -(-count // 4) * 4


def _size(rows: int, width: int, groups: int) -> int:
    return (3 + groups) * _aligned(rows) + groups * _aligned(rows * width)


def _cut(
    whole: Tensor, rows: int, width: int, groups: int
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    sizes = [_aligned(rows)] * (3 + groups) + [_aligned(rows * width)] * groups
    parts = whole.split_with_sizes(sizes)
    token_ids, positions, kv_lens, *slots = (part[:rows] for part in parts[: 3 + groups])
    tables = [part[: rows * width].view(rows, width) for part in parts[3 + groups :]]
    return token_ids, positions, kv_lens, slots, tables
