"""The decoder-only model: a flattened ragged batch of tokens in, logits of the asked tokens out.

Knows layers and tensors; not batches, requests, files or the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from noria.engine.models.rope import cos_sin, inverse_frequencies
from noria.engine.models.spec import ModelSpec
from noria.kernels import ops
from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import AttentionPlan, KVPools, PackedLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` gives queries, keys and values side by side; `gate_up` gives gate beside up."""

    attention_norm: Tensor  # [hidden]
    qkv: PackedLinear  # [(Hq + 2 Hk) * D, hidden]
    output: PackedLinear  # [hidden, Hq * D]
    ffn_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # [2 * ffn, hidden]
    down: PackedLinear  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model."""

    embedding: Tensor  # [vocab, hidden], any float type
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    head: PackedLinear  # [vocab, hidden]


class Decoder:
    """A Llama-family model (pre-norm, rotary positions, grouped-query attention, SwiGLU). Holds weights only."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self._weights = weights
        self._inv_freq = inverse_frequencies(spec.rope, spec.head_dim)
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
        x = F.embedding(token_ids, self._weights.embedding).float()  # [T, hidden]
        angles = cos_sin(self._inv_freq, positions)
        plan = ops.plan_attention(layout, kv.keys[0])
        for index, layer in enumerate(self._weights.layers):
            x = self._attention(x, layer, angles, kv.keys[index], kv.values[index], layout, plan)
            x = self._feed_forward(x, layer)
        return x

    @torch.inference_mode()
    def final(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] behind the final norm, as embeddings are made of: float32 [N, hidden]."""
        return ops.rms_norm(hidden, self._weights.norm, self.spec.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of hidden states [L, hidden]: float32 [L, vocab]. The head is the largest matrix, so only
        the tokens that need it come here."""
        return ops.linear(self.final(hidden), self._weights.head)

    def _attention(
        self,
        x: Tensor,
        layer: LayerWeights,
        angles: tuple[Tensor, Tensor],
        k_pool: Tensor,
        v_pool: Tensor,
        layout: RaggedLayout,
        plan: AttentionPlan,
    ) -> Tensor:
        spec = self.spec
        normed = ops.rms_norm(x, layer.attention_norm, spec.norm_eps)
        qkv = ops.linear(normed, layer.qkv).view(len(x), -1, spec.head_dim)  # [T, Hq + 2 Hk, D]
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotated = ops.rope(qkv[:, :num_rotated], *angles)
        ops.write_kv(rotated[:, spec.num_heads :], qkv[:, num_rotated:], k_pool, v_pool, layout.slot_mapping)
        attended = ops.ragged_attention(rotated[:, : spec.num_heads], k_pool, v_pool, layout, self._scale, plan)
        return x + ops.linear(attended.flatten(1), layer.output)

    def _feed_forward(self, x: Tensor, layer: LayerWeights) -> Tensor:
        normed = ops.rms_norm(x, layer.ffn_norm, self.spec.norm_eps)
        return x + ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up)), layer.down)
