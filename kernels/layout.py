"""How a ragged batch lies in memory: which token belongs to which row, and where its keys and values are.

Integers only, built once per step on the host. Knows nothing of requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        query_start = [0]
        for _, new, _ in rows:
            query_start.append(query_start[-1] + new)
        starts = torch.tensor(query_start, dtype=torch.int32)
        lengths = torch.tensor([computed + new for computed, new, _ in rows], dtype=torch.int32)

        def of_group(group: int, others: tuple[RaggedLayout, ...] = ()) -> RaggedLayout:
            tables = [blocks[group::num_groups] if num_groups > 1 else blocks for _, _, blocks in rows]
            slots: list[int] = []
            for (computed, new, _), table in zip(rows, tables, strict=True):
                slots.extend(
                    table[p // block_size] * block_size + p % block_size for p in range(computed, computed + new)
                )
            width = max(map(len, tables), default=0)
            padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
            return RaggedLayout(
                query_start=starts,
                kv_lens=lengths,
                block_table=padded.reshape(len(rows), width).clamp_(min=0),
                slot_mapping=torch.tensor(slots, dtype=torch.int64),
                decode_rows=decode_rows,
                block_size=block_size,
                others=others,
            )

        return of_group(0, tuple(of_group(group) for group in range(1, num_groups)))
