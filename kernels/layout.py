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
    block_table: Tensor  # int32 [R, max_blocks]: KV blocks of the row, in order; padding is 0 and never read
    slot_mapping: Tensor  # int64 [T]: block * block_size + offset where each token's K and V are written
    decode_rows: int  # rows 0 .. decode_rows - 1 are decode rows of exactly one token each
    block_size: int

    @property
    def num_rows(self) -> int:
        return self.kv_lens.shape[0]

    @staticmethod
    def build(rows: list[tuple[int, int, list[int]]], decode_rows: int, block_size: int) -> RaggedLayout:
        """Lay out rows of (tokens already computed, new tokens, blocks), decode rows first."""
        query_start = [0]
        slots: list[int] = []
        width = max((len(blocks) for _, _, blocks in rows), default=0)
        for computed, new, blocks in rows:
            query_start.append(query_start[-1] + new)
            slots.extend(blocks[p // block_size] * block_size + p % block_size for p in range(computed, computed + new))
        return RaggedLayout(
            query_start=torch.tensor(query_start, dtype=torch.int32),
            kv_lens=torch.tensor([computed + new for computed, new, _ in rows], dtype=torch.int32),
            block_table=torch.tensor([b + [0] * (width - len(b)) for _, _, b in rows], dtype=torch.int32).reshape(
                len(rows), width
            ),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            decode_rows=decode_rows,
            block_size=block_size,
        )
