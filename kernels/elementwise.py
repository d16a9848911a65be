"""What a layer computes token by token, in Triton: norm with the residual added, rotary positions with the write of
keys and values, and the gate of the feed-forward layer.

One token is one program's: its bits do not depend on its mates. Knows no requests or models.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SILU_BLOCK = 1024

LARGEST = tl.constexpr(448.0)  # that 8-bit floats (e4m3) hold
SMALLEST_POWER = tl.constexpr(2.0**-6)  # below it their steps get no finer
ROUNDER = tl.constexpr(1.5 * 2.0**20)  # a number plus this many times its power of two keeps three bits of its mantissa


@triton.jit
def as_kept(values, kept: tl.constexpr):
    """float32 as an element of a pool, to the nearest and then the even one; what 8-bit floats cannot hold becomes the
    largest they do. They are rounded before the cast, which Triton's interpreter gets wrong."""
    if kept == tl.float8e4nv:
        values = tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        anchor = tl.maximum(power, SMALLEST_POWER) * ROUNDER
        values = (values + anchor) - anchor
    return values.to(kept)


@triton.jit
def rms_norm_kernel(
    x,  # [T, C]
    delta,  # [T, C]: added to x first, where ADD
    weight,  # [C]
    out,  # [T, C]
    x_stride,
    eps,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ADD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < C
    values = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + token * C + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)  # the norm is of what the next layer will find
        tl.store(x + token * x_stride + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / C + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * C + columns, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_write_kv_kernel(
    qkv,  # [T, (Hq + 2 Hk) * D]
    angles,  # float32 [positions, D]: cosines, then sines
    positions,  # int32 [T]
    slots,  # int32 [T]; negative: a padding token, whose keys and values go nowhere
    queries,  # [T, Hq, D]
    k_pool,  # [slots, Hk, D]
    v_pool,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    pairs = tl.arange(0, BLOCK_HALF)
    paired = pairs < half
    turn = angles + tl.load(positions + token).to(tl.int64) * HEAD_DIM + pairs
    cos = tl.load(turn, mask=paired, other=0.0)[None, :]
    sin = tl.load(turn + half, mask=paired, other=0.0)[None, :]
    row = qkv + token * qkv_stride

    heads = tl.arange(0, BLOCK_Q)
    there = (heads < NUM_HEADS)[:, None] & paired[None, :]
    place = heads[:, None] * HEAD_DIM + pairs[None, :]
    first = tl.load(row + place, mask=there, other=0.0).to(tl.float32)
    second = tl.load(row + place + half, mask=there, other=0.0).to(tl.float32)
    to = queries + token * (NUM_HEADS * HEAD_DIM) + place
    tl.store(to, (first * cos - second * sin).to(queries.dtype.element_ty), mask=there)
    tl.store(to + half, (second * cos + first * sin).to(queries.dtype.element_ty), mask=there)

    if slot >= 0:
        kv_heads = tl.arange(0, BLOCK_K)
        is_kv = (kv_heads < KV_HEADS)[:, None] & paired[None, :]
        offsets = kv_heads[:, None] * HEAD_DIM + pairs[None, :]
        keys = row + NUM_HEADS * HEAD_DIM + offsets
        k_first = tl.load(keys, mask=is_kv, other=0.0).to(tl.float32)
        k_second = tl.load(keys + half, mask=is_kv, other=0.0).to(tl.float32)
        k_to = k_pool + slot * (KV_HEADS * HEAD_DIM) + offsets
        tl.store(k_to, as_kept(k_first * cos - k_second * sin, k_pool.dtype.element_ty), mask=is_kv)
        tl.store(k_to + half, as_kept(k_second * cos + k_first * sin, k_pool.dtype.element_ty), mask=is_kv)

        values = keys + KV_HEADS * HEAD_DIM
        v_to = v_pool + slot * (KV_HEADS * HEAD_DIM) + offsets
        v_first = tl.load(values, mask=is_kv, other=0.0).to(tl.float32)
        v_second = tl.load(values + half, mask=is_kv, other=0.0).to(tl.float32)
        tl.store(v_to, as_kept(v_first, v_pool.dtype.element_ty), mask=is_kv)
        tl.store(v_to + half, as_kept(v_second, v_pool.dtype.element_ty), mask=is_kv)


@triton.jit
def silu_mul_kernel(gate_up, out, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate = tl.load(gate_up + token * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + F + columns, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out + token * F + columns, (silu * up).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """Root mean square norm of the rows of x [T, C] with weight [C], reckoned in float32. With `delta` [T, C] that is
    first added to x, in place."""
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        added = x if delta is None else delta
        block = triton.next_power_of_2(width)
        options = {"num_warps": min(8, max(1, block // 512)), "enable_fp_fusion": True}
        rms_norm_kernel[(tokens,)](
            x, added, weight, out, x.stride(0), eps, C=width, BLOCK_C=block, ADD=delta is not None, **options
        )
    return out


def rope_write_kv(
    qkv: Tensor, angles: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor
) -> Tensor:
    """Rotate the queries and keys of qkv [T, (Hq + 2 Hk) D] by the angles of their positions and store keys and values
    at their slots in pools [blocks, block size, Hk, D]; negative slots are skipped -> rotated queries [T, Hq, D]. Pools
    of float8_e4m3fn hold the numbers themselves, without a scale, those beyond 448 as 448.

    angles float32 [positions, D]: cosines, then sines; positions and slots int32 [T].
    """
    tokens, (_, _, kv_heads, head_dim) = len(qkv), k_pool.shape
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    queries = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        rope_write_kv_kernel[(tokens,)](
            qkv,
            angles,
            positions,
            slots,
            queries,
            k_pool,
            v_pool,
            qkv.stride(0),
            NUM_HEADS=num_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_Q=triton.next_power_of_2(num_heads),
            BLOCK_K=triton.next_power_of_2(kv_heads),
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return queries


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2F] = gate beside up, reckoned in float32 -> [T, F]."""
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, triton.cdiv(width, SILU_BLOCK))
        silu_mul_kernel[grid](
            gate_up, out, gate_up.stride(0), F=width, BLOCK=SILU_BLOCK, num_warps=4, enable_fp_fusion=True
        )
    return out
