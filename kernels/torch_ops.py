"""The operations in plain torch: the backend of machines without our own kernels.

Knows no requests or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from noria.kernels import torch_attention
from noria.kernels.compiles import Compiles
from noria.kernels.layers import LayerForm, LayerWeights, run_layers
from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import Scores
from noria.kernels.pools import KVPools
from noria.kernels.torch_attention import AttentionPlan
from noria.kernels.weights import Part, stacked_floats

PACKED_FOR_ROWS = 8
"""Rows of x that oneDNN is told to expect when it chooses how to lay weights out; any number runs. Measured on two
AVX2 cores over all matrices of a 135M model, ms for 1 / 8 / 64 / 512 rows: told 1: 27 / 55 / 165 / 786; told 8 or
16: 24-30 / 35-41 / 120 / 750; not packed (`F.linear`): 49 / 98 / 169 / 911."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [O, C] in the layout of whatever multiplies it. The plain weight is not kept when it was packed."""

    weight: Tensor  # oneDNN's blocked layout if `packed`, else plain [O, C]
    bias: Tensor | None  # [O]
    out_features: int
    in_features: int
    packed: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    layout: RaggedLayout
    attention: AttentionPlan
    cos: Tensor  # [T, D / 2]
    sin: Tensor
    scores: Scores


class TorchOps:
    """See `ops.Ops`. Pools are [num_blocks, block_size, Hk, D]."""

    name = "torch"
    deterministic = False
    compiles = Compiles()  # none, ever
    device = torch.device("cpu")

    def pack_linear(self, parts: Sequence[Part], bias: Tensor | None = None) -> PackedLinear:
        weight = stacked_floats(parts)
        out_features, in_features = weight.shape
        packed = _can_pack(weight)
        if packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        return PackedLinear(weight, bias, out_features, in_features, packed)

    def linear(self, x: Tensor, packed: PackedLinear, add_to: Tensor | None = None) -> Tensor:
        """Packed weights give each row the same bits whatever other rows there are; plain ones (`F.linear`) do not."""
        product: Tensor
        if not packed.packed:
            product = F.linear(x, packed.weight, packed.bias)
        elif x.shape[0] == 0:
            product = x.new_empty(0, packed.out_features)
        else:
            product = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
        return product if add_to is None else add_to.add_(product)

    def pack_norm(self, weight: Tensor) -> Tensor:
        return weight

    def pack_table(self, weight: Part, head: PackedLinear | None) -> Tensor:
        return stacked_floats([weight])

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def new_kv_pools(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVPools:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return KVPools(
            keys=[torch.zeros(shape, dtype=dtype) for _ in range(num_layers)],
            values=[torch.zeros(shape, dtype=dtype) for _ in range(num_layers)],
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def plan_step(
        self, layout: RaggedLayout, positions: Tensor, angles: Tensor, kv: KVPools, num_heads: int, scores: Scores
    ) -> StepPlan:
        cos, sin = angles.index_select(0, positions).chunk(2, dim=1)
        attention = torch_attention.plan_attention(layout, kv.keys[0], scores.window)
        return StepPlan(layout, attention, cos, sin, scores)

    def rope_write_kv(self, qkv: Tensor, kv: KVPools, layer: int, plan: StepPlan) -> Tensor:
        heads = qkv.view(len(qkv), -1, kv.head_dim)
        num_rotated = heads.shape[1] - kv.num_kv_heads
        num_heads = num_rotated - kv.num_kv_heads
        rotated = rope(heads[:, :num_rotated], plan.cos, plan.sin)
        write_kv(
            rotated[:, num_heads:], heads[:, num_rotated:], kv.keys[layer], kv.values[layer], plan.layout.slot_mapping
        )
        return rotated[:, :num_heads]

    def ragged_attention(self, q: Tensor, kv: KVPools, layer: int, plan: StepPlan) -> Tensor:
        attended = torch_attention.ragged_attention(q, kv.keys[layer], kv.values[layer], plan.attention, plan.scores)
        return attended.flatten(1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def pack_layers(self, layers: Sequence[LayerWeights]) -> list[LayerWeights]:
        return list(layers)

    def pack_low_ranks(self, pairs: Mapping[Any, Any], num_layers: int) -> None:
        return None

    def run_layers(
        self,
        x: Tensor,
        layers: list[LayerWeights],
        eps: float,
        kv: KVPools,
        plan: StepPlan,
        adapted: Sequence[Any] = (),
    ) -> Tensor:
        return run_layers(self, x, layers, LayerForm(eps), kv, [plan] * len(layers))


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T, Hk, D] at their slots [T] of the pools, in place."""
    k_pool.flatten(0, 1).index_copy_(0, slot_mapping, k.to(k_pool.dtype))
    v_pool.flatten(0, 1).index_copy_(0, slot_mapping, v.to(v_pool.dtype))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, H, D] in half-rotation order (pairs i and i + D / 2); cos and sin [T, D / 2]."""
    half = x.shape[-1] // 2
    c, s = cos[:, None, :], sin[:, None, :]
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.sub(first * c, second * s, out=out[..., :half])
    torch.add(second * c, first * s, out=out[..., half:])
    return out


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
