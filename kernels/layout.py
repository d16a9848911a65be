"""How a ragged batch lies in memory: which token belongs to which row, and where its keys and values are.

Integers only, built once per step on the host. Knows nothing of requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """One step's rows flattened into T tokens; R rows, decode rows first.

    Rows are routed by phase, not by query length: a row of one token that belongs to a prompt is a prefill row, so
    that the way a prompt is cut into chunks never changes which kernel computes it.
    """

    query_start: Tensor  # int32 [R + 1]: row r's tokens are query_start[r] : query_start[r + 1]
    kv_lens: Tensor  # int32 [R]: tokens of the row once this step's are written
    block_table: Tensor  # int32 [R, max_blocks]: KV blocks of the row, in order; 0, and never read, where it has none
    slot_mapping: Tensor  # int64 [T]: block * block_size + offset where each token's K and V are written
    decode_rows: int  # rows 0 .. decode_rows - 1 are decode rows of exactly one token each
    block_size: int
    others: tuple[RaggedLayout, ...] = ()  # the same rows in the KV cache of the second and further groups of layers

    def of(self, group: int) -> RaggedLayout:
        """The layout for a group of layers; for all of them this one, where it was built for no groups."""
        return self.others[group - 1] if group and self.others else self

    @property
    def num_rows(self) -> int:
        return self.kv_lens.shape[0]

    @staticmethod
    def build(
        rows: list[tuple[int, int, list[int]]], decode_rows: int, block_size: int, num_groups: int = 1
    ) -> RaggedLayout:
        """Lay out rows of (tokens already computed, new tokens, blocks), decode rows first. With groups of layers the
        blocks of a page stand side by side, one for each group; one that is negative is not there."""
        starts = torch.tensor([0, *accumulate([new for _, new, _ in rows])], dtype=torch.int32)
        lengths = torch.tensor([computed + new for computed, new, _ in rows], dtype=torch.int32)
        layouts = []
        for group in range(num_groups):
            tables = [blocks[group::num_groups] if num_groups > 1 else blocks for _, _, blocks in rows]
            table, slots = _places(tables, rows, block_size)
            layouts.append(RaggedLayout(starts, lengths, table, slots, decode_rows, block_size))
        return replace(layouts[0], others=tuple(layouts[1:])) if num_groups > 1 else layouts[0]


def _places(tables: list[list[int]], rows: list[tuple[int, int, list[int]]], block_size: int) -> tuple[Tensor, Tensor]:
    """Block table and slot mapping of one group, in which the rows have blocks `tables`."""
    slots: list[int] = []
    for (first, new, _), table in zip(rows, tables, strict=True):
        slots.extend([table[p // block_size] * block_size + p % block_size for p in range(first, first + new)])
    width = max(map(len, tables), default=0)
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    if min([table[0] for table in tables if table], default=0) < 0:  # blocks go back from the start on
        padded.clamp_(min=0)
    return padded.reshape(len(rows), width), torch.tensor(slots, dtype=torch.int64)
