"""Runs one iteration on this rank: ragged batch, model, sampler.

Holds weights and KV tensors and nothing else; knows no requests, no policy and no transport.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noria.engine.execution.pooling import pool
from noria.engine.execution.ragged import FlatBatch, flatten
from noria.engine.execution.sampler import logprobs, sample, token_logprob
from noria.engine.execution.step import RowOutput, StepInput
from noria.engine.models.decoder import Decoder
from noria.engine.wire.messages import TokenLogprob
from noria.kernels.pools import KVPools

PROMPT_LOGITS = 64
"""Positions whose logits are held at once for prompt log-probabilities: 64 x 49,152 floats are 12 MB."""


class ModelRunner:
    """A model and its KV pools. `execute` is called by one thread at a time."""

    def __init__(self, model: Decoder, kv: KVPools, block_size: int) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size

    def execute(self, step: StepInput) -> list[RowOutput]:
        """One iteration; outputs in the order of `step.rows`."""
        with torch.inference_mode():
            batch = flatten(step, self._block_size)
            hidden = self._model.hidden_states(batch.token_ids, batch.positions, self._kv, batch.layout)
            logits = self._model.logits(hidden[batch.logit_rows[: batch.num_sampled]])
            sampled = iter(sample(logits, [row.sampling for row in step.rows if row.sampling is not None]))
            prompts = self._prompt_logprobs(step, batch, hidden)
            pooled = self._pool(step, batch, hidden)
        outputs: list[RowOutput] = []
        for place, (row, prompt) in enumerate(zip(step.rows, prompts, strict=True)):
            if row.pooling is not None:
                outputs.append(pooled[place])
                continue
            output = next(sampled) if row.sampling is not None else RowOutput()
            outputs.append(
                output
                if prompt is None
                else RowOutput(output.token_ids, output.logprobs, prompt_logprobs=prompt, error=output.error)
            )
        return outputs

    def _pool(self, step: StepInput, batch: FlatBatch, hidden: Tensor) -> dict[int, RowOutput]:
        """By place in the step: outputs of the rows that become part of a vector. They sample nothing."""
        outputs: dict[int, RowOutput] = {}
        starts = batch.layout.query_start
        for place, row in enumerate(step.rows):
            if row.pooling is None:
                continue
            states = self._model.final(hidden[int(starts[place]) : int(starts[place + 1])])
            vector = pool(states, row.pooling, row.start + len(row.token_ids))
            broken = "the model's hidden states are not finite" if vector is None else None
            outputs[place] = RowOutput(pooled=vector, error=broken)
        return outputs

    def _prompt_logprobs(self, step: StepInput, batch: FlatBatch, hidden: Tensor) -> list[list[TokenLogprob] | None]:
        """For rows that asked: an entry for each of their `prompt_targets`."""
        entries: list[list[TokenLogprob] | None] = []
        next_row = batch.num_sampled
        for row in step.rows:
            if row.prompt_targets is None:
                entries.append(None)
                continue
            found: list[TokenLogprob] = []
            for first in range(0, len(row.prompt_targets), PROMPT_LOGITS):
                targets = row.prompt_targets[first : first + PROMPT_LOGITS]
                table = logprobs(self._model.logits(hidden[batch.logit_rows[next_row : next_row + len(targets)]]))
                found += [token_logprob(r, t, row.prompt_alternatives) for r, t in zip(table, targets, strict=True)]
                next_row += len(targets)
            entries.append(found)
        return entries
