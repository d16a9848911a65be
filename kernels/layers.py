"""How a decoder's layers are made of the operations, one at a time: Llama's layer, norm before, rotary positions,
grouped-query attention, SwiGLU.

Knows no model, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from noria.kernels.ops import LayerWeights, Ops
from noria.kernels.pools import KVPools


def run_layers(ops: Ops, x: Tensor, layers: Sequence[LayerWeights], eps: float, kv: KVPools, plan: Any) -> Tensor:
    """What `Ops.run_layers` computes, an operation at a time. x may be overwritten."""
    for index, layer in enumerate(layers):
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)
        queries = ops.rope_write_kv(qkv, kv, index, plan)
        x = ops.linear(ops.ragged_attention(queries, kv, index, plan), layer.output, add_to=x)
        gate_up = ops.linear(ops.rms_norm(x, layer.ffn_norm, eps), layer.gate_up)
        x = ops.linear(ops.silu_mul(gate_up), layer.down, add_to=x)
    return x
