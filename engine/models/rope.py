"""Angles of the rotary position embedding for given positions.

Knows the formulas only; `ops.rope` applies the rotation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noria.engine.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per token of each pair of channels: float32 [head_dim / 2]."""
    plain = 1.0 / (rope.base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def cos_sin(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle: positions [T] -> two float32 [T, head_dim / 2]."""
    angles = positions.float()[:, None] * inv_freq[None, :]
    return angles.cos(), angles.sin()


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    wave_length = 2 * math.pi / plain
    turns = rope.original_max_len / wave_length  # within the context that the model was first trained on
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, plain, scaled)
