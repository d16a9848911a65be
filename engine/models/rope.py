"""Angles of the rotary position embedding for given positions.

Knows the formulas only; the kernels apply the rotation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noria.engine.models.spec import RopeSpec

FIRST_POSITIONS = 2048


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


class RotaryAngles:
    """The table of all positions' angles, grown as longer contexts come."""

    def __init__(self, rope: RopeSpec, head_dim: int) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim)
        self._table = self._rows(FIRST_POSITIONS)

    def up_to(self, num_positions: int) -> Tensor:
        """float32 [at least num_positions, head_dim]: the cosines of a position's angles, then their sines."""
        if num_positions > len(self._table):
            self._table = self._rows(2 * num_positions)
        return self._table

    def _rows(self, num_positions: int) -> Tensor:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self._inv_freq[None, :]
        return torch.cat((angles.cos(), angles.sin()), dim=1)


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    wave_length = 2 * math.pi / plain
    turns = rope.original_max_len / wave_length  # within the context that the model was first trained on
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, plain, scaled)
