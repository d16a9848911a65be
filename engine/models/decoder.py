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
from noria.kernels.ops import Ops
from noria.kernels.pools import KVPools

Packed = Any
"""A linear layer as `Ops.pack_linear` laid it out."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` gives queries, keys and values side by side; `gate_up` gives gate beside up."""

    attention_norm: Tensor  # [hidden]
    qkv: Packed  # [(Hq + 2 Hk) * D, hidden]
    output: Packed  # [hidden, Hq * D]
    ffn_norm: Tensor  # [hidden]
    gate_up: Packed  # [2 * ffn, hidden]
    down: Packed  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, packed by the operations that compute with them."""

    embedding: Any  # [vocab, hidden], as `Ops.pack_table` laid it out
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    head: Packed  # [vocab, hidden]


class Decoder:
    """A Llama-family model (pre-norm, rotary positions, grouped-query attention, SwiGLU). Holds weights only."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        self._weights = weights
        self._angles = RotaryAngles(spec.rope, spec.head_dim)
        self._scale = spec.head_dim**-0.5

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv: KVPools, layout: RaggedLayout, logit_rows: Tensor
    ) -> Tensor:
        """`hidden_states`, then `logits` of the tokens at logit_rows int64 [L] in 0 .. T - 1: float32 [L, vocab]."""
        return self.logits(self.hidden_states(token_ids, positions, kv, layout).index_select(0, logit_rows))

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor, positions: Tensor, kv: KVPools, layout: RaggedLayout) -> Tensor:
        """Run T tokens through the stack, writing their keys and values into `kv`; float32 [T, hidden].

        token_ids and positions int64 [T], flattened as `layout` says; positions count from 0 in each row.
        """
        x = self.ops.embed(self._weights.embedding, token_ids)
        angles = self._angles.up_to(int(positions.max()) + 1 if len(positions) else 0)
        plan = self.ops.plan_step(layout, positions, angles, kv, self._scale)
        for index, layer in enumerate(self._weights.layers):
            x = self._attention(x, layer, index, kv, plan)
            x = self._feed_forward(x, layer)
        return x

    @torch.inference_mode()
    def final(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] behind the final norm, as embeddings are made of: float32 [N, hidden]."""
        return self.ops.rms_norm(hidden, self._weights.norm, self.spec.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of hidden states [L, hidden]: float32 [L, vocab]. The head is the largest matrix, so only
        the tokens that need it come here."""
        return self.ops.linear(self.final(hidden), self._weights.head)

    def _attention(self, x: Tensor, layer: LayerWeights, index: int, kv: KVPools, plan: Any) -> Tensor:
        ops = self.ops
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, self.spec.norm_eps), layer.qkv)
        queries = ops.rope_write_kv(qkv, kv, index, plan)
        return ops.linear(ops.ragged_attention(queries, kv, index, plan), layer.output, add_to=x)

    def _feed_forward(self, x: Tensor, layer: LayerWeights) -> Tensor:
        ops = self.ops
        gate_up = ops.linear(ops.rms_norm(x, layer.ffn_norm, self.spec.norm_eps), layer.gate_up)
        return ops.linear(ops.silu_mul(gate_up), layer.down, add_to=x)
