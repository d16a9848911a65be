"""The public operations on tensors, and the choice of what computes them on this machine.

Callers see shapes and numbers only; `reference.py` says what each operation means. Knows no requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from noria.kernels import torch_attention
from noria.kernels.layout import RaggedLayout

AttentionPlan = torch_attention.AttentionPlan

PACKED_FOR_ROWS = 8
"""Rows of x that oneDNN is told to expect when it chooses how to lay weights out; any number runs. Measured on two
AVX2 cores over all matrices of a 135M model, ms for 1 / 8 / 64 / 512 rows: told 1: 27 / 55 / 165 / 786; told 8 or
16: 24-30 / 35-41 / 120 / 750; not packed (`F.linear`): 49 / 98 / 169 / 911."""


@dataclass(frozen=True, slots=True)
class KVPools:
    """The paged KV cache: per layer one pool of keys and one of values, [num_blocks, block_size, Hk, D] each."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int


def new_kv_pools(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> KVPools:
    """Empty pools. The system hands out zeroed pages on first touch, so memory is taken as blocks are written."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return KVPools(
        keys=[torch.zeros(shape, dtype=dtype) for _ in range(num_layers)],
        values=[torch.zeros(shape, dtype=dtype) for _ in range(num_layers)],
        block_size=block_size,
    )


def kv_bytes_per_block(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of one block over all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def plan_attention(layout: RaggedLayout, pool: Tensor) -> AttentionPlan:
    """What all layers of a step share, for pools like `pool`: made once, passed to every `ragged_attention`."""
    return torch_attention.plan_attention(layout, pool)


def ragged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    layout: RaggedLayout,
    scale: float,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the rows' blocks in pools [num_blocks, block_size, Hk, D] -> [T, Hq, D].

    This step's keys and values must be written first. Rows read their own tokens and nothing else of the pools.
    """
    if plan is None:
        plan = plan_attention(layout, k_pool)
    return torch_attention.ragged_attention(q, k_pool, v_pool, plan, scale)


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of the rows of x [T, C] with weight [C]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2F] = gate beside up -> [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [O, C] in the layout of whatever multiplies it. The plain weight is not kept when it was packed."""

    weight: Tensor  # oneDNN's blocked layout if `packed`, else plain [O, C]
    bias: Tensor | None  # [O]
    out_features: int
    in_features: int
    packed: bool


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Lay a float32 weight [O, C] out for `linear`, with oneDNN where this build of torch has it."""
    out_features, in_features = weight.shape
    packed = _can_pack(weight)
    if packed:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return PackedLinear(weight, bias, out_features, in_features, packed)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x [T, C] times the transpose of the packed weight, plus its bias -> [T, O].

    Packed weights give each row the same bits whatever other rows there are; plain ones (`F.linear`) do not.
    """
    if not packed.packed:
        return F.linear(x, packed.weight, packed.bias)
    if x.shape[0] == 0:
        return x.new_empty(0, packed.out_features)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
    return product


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
