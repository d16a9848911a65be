"""Flattens a batch's rows into one run of tokens: selective batching (Orca, section 3.2).

Everything but attention sees the tokens of all requests as one [T, hidden] matrix; the layout tells attention apart
what belongs to whom. Knows no sampling and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noria.engine.execution.step import StepInput
from noria.kernels.layout import RaggedLayout


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Tensors of one iteration. `logit_rows` index the T tokens whose logits are wanted: first the last token of each
    sampling row, in row order, then the positions of rows that asked for prompt log-probabilities."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    layout: RaggedLayout
    logit_rows: Tensor  # int64 [L]
    num_sampled: int


def flatten(step: StepInput, block_size: int) -> FlatBatch:
    """Lay the rows of `step` end to end."""
    token_ids: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    prompt: list[int] = []
    for row in step.rows:
        first = len(token_ids)
        token_ids.extend(row.token_ids)
        positions.extend(range(row.start, row.start + len(row.token_ids)))
        if row.sampling is not None:
            last.append(len(token_ids) - 1)
        if row.prompt_targets:
            prompt.extend(range(first, first + len(row.prompt_targets)))
    layout = RaggedLayout.build(
        [(row.start, len(row.token_ids), row.blocks) for row in step.rows], step.decode_rows, block_size
    )
    return FlatBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        layout=layout,
        logit_rows=torch.tensor(last + prompt, dtype=torch.int64),
        num_sampled=len(last),
    )
