"""Runs one iteration on this rank: ragged batch, model, sampler.

Holds weights and KV tensors and nothing else; knows no requests, no policy and no transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from noria.engine.execution.decode_graphs import DecodeGraphs
from noria.engine.execution.device_sampler import sample_on_device
from noria.engine.execution.pooling import pool
from noria.engine.execution.ragged import FlatBatch, flatten
from noria.engine.execution.sampler import logprobs, sample, token_logprob
from noria.engine.execution.step import RowInput, RowOutput, StepInput
from noria.engine.models.decoder import Model
from noria.engine.models.lora import Adapter
from noria.engine.wire.messages import TokenLogprob
from noria.kernels.low_rank import AdaptedRows
from noria.kernels.pools import KVPools
from noria.kernels.transfer import to_device

PROMPT_LOGITS = 64
"""Positions whose logits are held at once for prompt log-probabilities: 64 x 49,152 floats are 12 MB."""


class ModelRunner:
    """A model, its KV pools, and the loaded adapters by their digests, which somebody else adds and takes away.
    `execute` is called by one thread at a time."""

    def __init__(
        self,
        model: Model,
        kv: KVPools,
        block_size: int,
        adapters: Mapping[str, Adapter] | None = None,
        num_groups: int = 1,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`num_groups`: groups of layers that have blocks of their own in the KV cache. `graphs` compute those steps
        that they can."""
        self._graphs = graphs
        # Logits of a GPU stay there: they are many, and ids are few.
        self._sample = sample_on_device if model.ops.name == "triton" else sample
        self._num_groups = num_groups
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._adapters = {} if adapters is None else adapters

    def execute(self, step: StepInput) -> list[RowOutput]:
        """One iteration; outputs in the order of `step.rows`."""
        batch = self.flatten(step)
        size = None if self._graphs is None else self._graphs.size_for(step)
        if self._graphs is not None and size is not None:
            with torch.inference_mode():
                logits, greedy = self._graphs.run(size, batch)
                return sample_on_device(logits, [row.sampling for row in step.rows if row.sampling], greedy)
        return self.choose(step, batch, self.hidden(batch))

    def flatten(self, step: StepInput) -> FlatBatch:
        return flatten(step, self._block_size, self._num_groups)

    def hidden(self, batch: FlatBatch, before: Tensor | None = None) -> Tensor:
        """[T, C] behind this rank's layers. `before`: what the pipeline stage before gave; it may be overwritten."""
        adapted = [
            AdaptedRows(self._adapters[digest].pairs, self._adapters[digest].packed, start, stop)
            for digest, start, stop in batch.adapted
        ]
        return self._model.hidden_states(batch.token_ids, batch.positions, self._kv, batch.layout, before, adapted)

    def contribute(self, step: StepInput, batch: FlatBatch, hidden: Tensor) -> None:
        """This shard's part in the logits that `choose` computes where tokens are chosen, in the same order."""
        self._model.logits(hidden[batch.logit_rows[: batch.num_sampled]])
        for _, places, _ in _prompt_slices(step, batch):
            self._model.logits(hidden[places])

    def choose(self, step: StepInput, batch: FlatBatch, hidden: Tensor) -> list[RowOutput]:
        """What the rows give, from hidden states behind the last layer."""
        with torch.inference_mode():
            sampling = to_device(batch.logit_rows[: batch.num_sampled], hidden.device)
            logits = self._model.logits(hidden[sampling])
            sampled = iter(
                self._sample(logits, [s for row in step.rows if row.sampling for s in (row.sampling, *row.draft)])
            )
            prompts = self._prompt_logprobs(step, batch, hidden)
            pooled = self._pool(step, batch, hidden)
        outputs: list[RowOutput] = []
        for place, (row, prompt) in enumerate(zip(step.rows, prompts, strict=True)):
            if row.pooling is not None:
                outputs.append(pooled[place])
                continue
            chosen = [next(sampled) for _ in range(1 + len(row.draft))] if row.sampling is not None else [RowOutput()]
            output = accepted(chosen, row) if row.draft else chosen[0]
            outputs.append(
                output
                if prompt is None
                else RowOutput(output.token_ids, output.logprobs, prompt_logprobs=prompt, error=output.error)
            )
        return outputs

    def _pool(self, step: StepInput, batch: FlatBatch, hidden: Tensor) -> dict[int, RowOutput]:
        """By place in the step: outputs of the rows that become part of a vector. They sample nothing."""
        outputs: dict[int, RowOutput] = {}
        for place, row in enumerate(step.rows):
            if row.pooling is None:
                continue
            start = batch.starts[place]
            states = self._model.final(hidden[start : start + len(row.token_ids)])
            vector = pool(states, row.pooling, row.start + len(row.token_ids))
            broken = "the model's hidden states are not finite" if vector is None else None
            outputs[place] = RowOutput(pooled=vector, error=broken)
        return outputs

    def _prompt_logprobs(self, step: StepInput, batch: FlatBatch, hidden: Tensor) -> list[list[TokenLogprob] | None]:
        """For rows that asked: an entry for each of their `prompt_targets`."""
        entries: list[list[TokenLogprob] | None] = [None if row.prompt_targets is None else [] for row in step.rows]
        for place, places, targets in _prompt_slices(step, batch):
            table = logprobs(self._model.logits(hidden[places]).to("cpu"))
            alternatives = step.rows[place].prompt_alternatives
            found = [token_logprob(row, token, alternatives) for row, token in zip(table, targets, strict=True)]
            entries[place] = [*(entries[place] or ()), *found]
        return entries


def _prompt_slices(step: StepInput, batch: FlatBatch) -> Iterator[tuple[int, Tensor, list[int]]]:
    """What is scored of prompts, as much at once as `PROMPT_LOGITS` allows: place of the row, tokens [L] in the batch,
    and what each of them should have predicted."""
    done = batch.num_sampled
    for place, row in enumerate(step.rows):
        for first in range(0, len(row.prompt_targets or ()), PROMPT_LOGITS):
            targets = (row.prompt_targets or [])[first : first + PROMPT_LOGITS]
            yield place, batch.logit_rows[done : done + len(targets)], targets
            done += len(targets)


def accepted(chosen: Sequence[RowOutput], row: RowInput) -> RowOutput:
    """What a row with guesses gives: the choice at each position counts as long as all guesses before it were right.

    Noise belongs to (seed, position, token) and not to the way a token comes about, so what is chosen here is what
    would be chosen one token at a time: no rule of rejection is needed to keep the distribution.
    """
    guesses = row.token_ids[len(row.token_ids) - len(row.draft) :]
    tokens: list[int] = []
    scores: list[TokenLogprob] = []
    for place, output in enumerate(chosen):
        if output.error is not None:
            return RowOutput(tuple(tokens), scores or None) if tokens else output  # the next iteration meets it first
        tokens += output.token_ids
        scores += output.logprobs or ()
        if place < len(guesses) and tokens[-1] != guesses[place]:
            break
    return RowOutput(tuple(tokens), scores or None)
