"""Flattens a batch's rows into one run of tokens: selective batching (Orca, section 3.2).

Everything but attention sees the tokens of all requests as one [T, hidden] matrix; the layout tells attention apart
what belongs to whom. Knows no sampling and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from noria.engine.execution.step import StepInput
from noria.kernels.layout import RaggedLayout


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Tensors of one iteration. `starts[i]` is the first token of row i. `logit_rows` index the T tokens whose logits
    are wanted: first the last token of each sampling row, with a guess before each further one, in row order; then the
    positions of rows that asked for prompt log-probabilities. `adapted` are runs of tokens under one adapter: its
    digest, first token, and the one behind the last."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    layout: RaggedLayout
    starts: list[int]
    logit_rows: Tensor  # int64 [L]
    num_sampled: int
    adapted: list[tuple[str, int, int]]


def flatten(step: StepInput, block_size: int, num_groups: int = 1) -> FlatBatch:
    """Lay the rows of `step` end to end. A decode row with guesses becomes a layout row for each of its tokens: so each
    is computed exactly as it would be in an iteration of its own."""
    token_ids: list[int] = []
    starts: list[int] = []
    parts: list[tuple[int, int, list[int]]] = []
    positions: list[int] = []
    last: list[int] = []
    prompt: list[int] = []
    for row in step.rows:
        first = len(token_ids)
        starts.append(first)
        token_ids.extend(row.token_ids)
        if row.draft:
            parts += [(row.start + i, 1, row.blocks) for i in range(len(row.token_ids))]
        else:
            parts.append((row.start, len(row.token_ids), row.blocks))
        positions.extend(range(row.start, row.start + len(row.token_ids)))
        if row.sampling is not None:
            last.extend(range(len(token_ids) - 1 - len(row.draft), len(token_ids)))
        if row.prompt_targets:
            prompt.extend(range(first, first + len(row.prompt_targets)))
    decode_rows = step.decode_rows + sum(len(row.draft) for row in step.rows)
    layout = RaggedLayout.build(parts, decode_rows, block_size, num_groups)
    return FlatBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        layout=layout,
        starts=starts,
        logit_rows=torch.tensor(last + prompt, dtype=torch.int64),
        num_sampled=len(last),
        adapted=_adapted(step, [*starts, len(token_ids)]) if any(row.adapter for row in step.rows) else [],
    )


def _adapted(step: StepInput, starts: list[int]) -> list[tuple[str, int, int]]:
    """Whoever made the batch has put the rows of one adapter next to each other."""
    places = groupby(range(len(step.rows)), lambda place: step.rows[place].adapter)
    runs = ((digest, list(run)) for digest, run in places)
    return [(digest, starts[run[0]], starts[run[-1] + 1]) for digest, run in runs if digest]
