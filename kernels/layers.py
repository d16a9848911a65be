"""How a decoder's layers are made of the operations, one at a time: attention and a feed-forward network, each added to
x, with norms before, behind or on both sides.

Knows no model, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from noria.kernels.experts import Experts, mix
from noria.kernels.ops import Ops, Packed
from noria.kernels.pools import KVPools


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm; with `is_centred` LayerNorm, which takes the mean off first."""

    weight: Tensor  # [C], as `Ops.pack_norm` laid it out
    bias: Tensor | None = None
    is_centred: bool = False


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` gives queries, keys and values side by side; `gate_up` gives gate beside up, or up alone. Norms
    that the model has not are None."""

    attention_norm: Norm | None  # of width hidden
    qkv: Packed  # [(Hq + 2 Hk) * D, hidden]
    output: Packed  # [hidden, Hq * D]
    ffn_norm: Norm | None  # None beside an attention norm: that one's result is read
    gate_up: Packed = None  # [2 * ffn, hidden]
    down: Packed = None  # [hidden, ffn]
    experts: Experts | None = None  # in place of these two
    query_norm: Norm | None = None  # of width D, or Hq * D
    key_norm: Norm | None = None
    attention_output_norm: Norm | None = None  # of what is added to x
    ffn_output_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What the layers of one model have in common; by itself Llama's."""

    eps: float
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    is_gated: bool = True
    is_parallel: bool = False  # attention and feed-forward read the same x
    residual_scale: float = 1.0  # of what is added to x


def run_layers(
    ops: Ops, x: Tensor, layers: Sequence[LayerWeights], form: LayerForm, kv: KVPools, plans: Sequence[Any]
) -> Tensor:
    """x [T, C] through all layers, an operation at a time; a plan for each layer. x may be overwritten. Llama's layers
    are what `Ops.run_layers` computes."""
    for index, (layer, plan) in enumerate(zip(layers, plans, strict=True)):
        inner = normed(ops, x, layer.attention_norm, form.eps)
        before = x
        if form.is_parallel and layer.ffn_norm is not None:
            before = normed(ops, x, layer.ffn_norm, form.eps)
        attended = _attend(ops, inner, layer, form.eps, kv, index, plan)
        if form.is_parallel:
            out = ops.linear(attended, layer.output, add_to=x)
            x = _feed_forward(ops, inner if layer.ffn_norm is None else before, layer, form, out)
            continue
        x = _add(ops, x, attended, layer.output, layer.attention_output_norm, form)
        x = _feed_forward(ops, normed(ops, x, layer.ffn_norm, form.eps), layer, form, x)
    return x


def normed(ops: Ops, x: Tensor, norm: Norm | None, eps: float) -> Tensor:
    """x itself where there is no norm."""
    if norm is None:
        return x
    if norm.is_centred:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, eps)
    return ops.rms_norm(x, norm.weight, eps)


def _attend(ops: Ops, x: Tensor, layer: LayerWeights, eps: float, kv: KVPools, index: int, plan: Any) -> Tensor:
    qkv = ops.linear(x, layer.qkv)
    if layer.query_norm is not None and layer.key_norm is not None:
        width = kv.num_kv_heads * kv.head_dim
        queries, keys = qkv[:, : -2 * width], qkv[:, -2 * width : -width]
        for part, norm in ((queries, layer.query_norm), (keys, layer.key_norm)):
            width = len(norm.weight)  # of a head, or of all
            part.copy_(normed(ops, part.reshape(-1, width).contiguous(), norm, eps).view(part.shape))
    return ops.ragged_attention(ops.rope_write_kv(qkv, kv, index, plan), kv, index, plan)


def _feed_forward(ops: Ops, x: Tensor, layer: LayerWeights, form: LayerForm, add_to: Tensor) -> Tensor:
    def activate(gate_up: Tensor) -> Tensor:
        return activated(ops, gate_up, form)

    if layer.experts is not None:
        return _scaled_add(
            add_to, normed(ops, mix(ops, x, layer.experts, activate), layer.ffn_output_norm, form.eps), form
        )
    return _add(ops, add_to, activate(ops.linear(x, layer.gate_up)), layer.down, layer.ffn_output_norm, form)


def activated(ops: Ops, x: Tensor, form: LayerForm) -> Tensor:
    """act(gate) * up of x [T, 2F], or act(x) of x [T, F]."""
    if form.is_gated and form.activation == "silu":
        return ops.silu_mul(x)
    if form.is_gated and form.activation == "gelu_tanh":
        return ops.gelu_mul(x)
    gate, up = x.chunk(2, dim=-1) if form.is_gated else (x, None)
    if form.activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if form.activation == "gelu_tanh" else "none")
    return gate if up is None else gate * up


def _add(ops: Ops, x: Tensor, inner: Tensor, linear: Packed, norm: Norm | None, form: LayerForm) -> Tensor:
    """x plus what a part of the layer gives, which ends in `linear`."""
    if norm is None and form.residual_scale == 1.0:
        return ops.linear(inner, linear, add_to=x)
    return _scaled_add(x, normed(ops, ops.linear(inner, linear), norm, form.eps), form)


def _scaled_add(x: Tensor, y: Tensor, form: LayerForm) -> Tensor:
    # Two roundings, never a fused one, so that a token's bits do not depend on where it lies in a vector register.
    return x.add_(y if form.residual_scale == 1.0 else y.mul_(form.residual_scale))
