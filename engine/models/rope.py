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
    """Radians per token of each pair of channels that turns: float32 [dim / 2]. ValueError for a kind that depends on
    the length served: `RopeSpec.for_length` settles it."""
    dim = rope.dim or head_dim
    wave = rope.base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.kind == "default":
        return 1.0 / wave
    if rope.kind == "linear":
        return 1.0 / wave / rope.factor
    if rope.kind == "factors":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * wave)
    if rope.kind == "llama3":
        return _llama3(1.0 / wave, rope)
    if rope.kind == "yarn":
        return _yarn(1.0 / wave, rope, dim)
    raise ValueError(f"rope {rope.kind} depends on the length served")


class RotaryAngles:
    """The table of all positions' angles, grown as longer contexts come.

    A head is D / 2 pairs of channels. Where only `dim` channels turn, the other pairs stand still (cosine 1, sine 0):
    `build` puts the channels in that order. Without rope all stand still.
    """

    def __init__(self, rope: RopeSpec | None, head_dim: int) -> None:
        self._inv_freq = torch.empty(0) if rope is None else inverse_frequencies(rope, head_dim)
        self._factor = 1.0 if rope is None else rope.attention_factor
        self._still = head_dim // 2 - len(self._inv_freq)
        self._table = self._rows(FIRST_POSITIONS)

    def up_to(self, num_positions: int) -> Tensor:
        """float32 [at least num_positions, head_dim]: the cosines of a position's angles, then their sines."""
        if num_positions > len(self._table):
            self._table = self._rows(2 * num_positions)
        return self._table

    def _rows(self, num_positions: int) -> Tensor:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self._inv_freq[None, :]
        ones, zeros = torch.ones(num_positions, self._still), torch.zeros(num_positions, self._still)
        return torch.cat((angles.cos() * self._factor, ones, angles.sin() * self._factor, zeros), dim=1)


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    wave_length = 2 * math.pi / plain
    turns = rope.original_max_len / wave_length  # within the context that the model was first trained on
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, plain, scaled)


def _yarn(plain: Tensor, rope: RopeSpec, dim: int) -> Tensor:
    """Pairs that make more than `beta_fast` turns within the first context keep their frequency, those with fewer than
    `beta_slow` have it divided by `factor`; between the two it goes over in equal steps."""

    def pair_of(turns: float) -> float:
        return dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.whole_steps:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high > low else 0.001)
    slow = ramp.clamp(0, 1)
    return plain / rope.factor * slow + plain * (1 - slow)
