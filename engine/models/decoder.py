"""The decoder-only model: a flattened ragged batch of tokens in, logits of the asked tokens out.

Knows layers and tensors; not batches, requests, files or the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noria.engine.models.rope import RotaryAngles
from noria.engine.models.spec import ModelSpec
from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import LayerWeights, Ops
from noria.kernels.pools import KVPools


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, packed by the operations that compute with them. A pipeline stage has no embedding unless
    it is the first, no norm and no head unless it is the last."""

    embedding: Any | None  # [vocab, hidden], as `Ops.pack_table` laid it out
    layers: list[LayerWeights]
    norm: Tensor | None  # [hidden]
    head: Any | None  # [vocab, hidden], as `Ops.pack_linear` laid it out


class Decoder:
    """A Llama-family model (pre-norm, rotary positions, grouped-query attention, SwiGLU). Holds weights only."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        self._weights = weights
        self._layers = ops.pack_layers(weights.layers)
        self._angles = RotaryAngles(spec.rope, spec.head_dim)
        self._scale = spec.head_dim**-0.5

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv: KVPools, layout: RaggedLayout, logit_rows: Tensor
    ) -> Tensor:
        """`hidden_states`, then `logits` of the tokens at logit_rows int64 [L] in 0 .. T - 1: float32 [L, vocab]."""
        return self.logits(self.hidden_states(token_ids, positions, kv, layout).index_select(0, logit_rows))

    @torch.inference_mode()
    def hidden_states(
        self, token_ids: Tensor, positions: Tensor, kv: KVPools, layout: RaggedLayout, x: Tensor | None = None
    ) -> Tensor:
        """Run T tokens through the stack, writing their keys and values into `kv`; [T, hidden].

        token_ids and positions int64 [T], flattened as `layout` says; positions count from 0 in each row.
        Hidden states are the operations' own: on their device and in their precision. `x`: those of the pipeline stage
        before, which take the place of the tokens' embeddings and may be overwritten.
        """
        if x is None:
            x = self.ops.embed(self._weights.embedding, token_ids)
        angles = self._angles.up_to(int(positions.max()) + 1 if len(positions) else 0)
        plan = self.ops.plan_step(layout, positions, angles, kv, self.spec.num_heads, self._scale)
        return self.ops.run_layers(x, self._layers, self.spec.norm_eps, kv, plan)

    @torch.inference_mode()
    def final(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] behind the final norm, as embeddings are made of: float32, on the CPU."""
        return self._normed(hidden).to("cpu", torch.float32)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of hidden states [L, hidden]: float32 [L, vocab], on the CPU. The head is the largest
        matrix, so only the tokens that need it come here."""
        return self.ops.linear(self._normed(hidden), self._weights.head).to("cpu", torch.float32)

    def _normed(self, hidden: Tensor) -> Tensor:
        if self._weights.norm is None:
            raise ValueError("only the last stage has a final norm")
        return self.ops.rms_norm(hidden, self._weights.norm, self.spec.norm_eps)
