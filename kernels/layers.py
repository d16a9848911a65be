"""A decoder's layers, and how they are made of the operations.

Llama's layer: norm before, rotary positions, grouped-query attention, SwiGLU. Knows no model, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from noria.kernels.pools import KVPools

if TYPE_CHECKING:
    from noria.kernels.ops import Ops

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


def run_layers(ops: Ops, x: Tensor, layers: Sequence[LayerWeights], eps: float, kv: KVPools, plan: Any) -> Tensor:
    """What `Ops.run_layers` computes, an operation at a time. x may be overwritten."""
    for index, layer in enumerate(layers):
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)
        queries = ops.rope_write_kv(qkv, kv, index, plan)
        x = ops.linear(ops.ragged_attention(queries, kv, index, plan), layer.output, add_to=x)
        gate_up = ops.linear(ops.rms_norm(x, layer.ffn_norm, eps), layer.gate_up)
        x = ops.linear(ops.silu_mul(gate_up), layer.down, add_to=x)
    return x
