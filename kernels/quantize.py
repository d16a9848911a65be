"""Rounds a matrix of floats to small integers in groups of 32 that share a scale, as the C kernels compute with them.

Weights alone, when a model is loaded. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from noria.kernels.weights import GroupedWeight

GROUP = 32

SPANS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that its 16 steps may span: values beyond are clipped, the rest is rounded more finely."""

ROWS_AT_ONCE = 1024
"""Rows rounded together, so that what is in between takes little memory."""


def to_bytes(weight: Tensor) -> GroupedWeight:
    """float32 [O, C], C a multiple of 32 -> signed bytes with half scales: w = scale * q, 8.5 bits a weight."""
    q, scale = zip(*(_bytes(groups) for groups in _parts(weight)), strict=True)
    return GroupedWeight(torch.cat(q).view(weight.shape), torch.cat(scale), None, half_scales=True)


def to_nibbles(weight: Tensor) -> GroupedWeight:
    """float32 [O, C], C a multiple of 32 -> 0 .. 15 with half scales and minima: w = scale * q + minimum, 5 bits a
    weight. The span of each group is the one of `SPANS` with the least squared error."""
    q, scale, minimum = zip(*(_nibbles(groups) for groups in _parts(weight)), strict=True)
    return GroupedWeight(torch.cat(q).view(weight.shape), torch.cat(scale), torch.cat(minimum), half_scales=True)


def _parts(weight: Tensor) -> Iterator[Tensor]:
    """[rows, G, 32]"""
    for first in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[first : first + ROWS_AT_ONCE]
        yield rows.reshape(len(rows), -1, GROUP)


def _bytes(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = _as_half(groups.abs().amax(dim=-1) / 127)
    return _steps(groups, scale, None, -127, 127).to(torch.int8), scale


def _nibbles(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    middle, half = (lowest + highest) / 2, (highest - lowest) / 2
    shape = groups.shape[:2]
    least, best, best_scale, best_minimum = torch.full(shape, torch.inf), groups, half, lowest
    for span in SPANS:
        scale, minimum = _as_half(span * half / 7.5), _as_half(middle - span * half)
        q = _steps(groups, scale, minimum, 0, 15)
        error = (q * scale[..., None] + minimum[..., None] - groups).square().sum(dim=-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better[..., None], q, best)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
    return best.to(torch.uint8), best_scale, best_minimum


def _steps(groups: Tensor, scale: Tensor, minimum: Tensor | None, least: int, most: int) -> Tensor:
    """How many scales each value is above the minimum."""
    above = groups if minimum is None else groups - minimum[..., None]
    return (above / scale.clamp(min=1e-30)[..., None]).round().clamp(least, most)


def _as_half(values: Tensor) -> Tensor:
    """Rounded to half precision."""
    return values.clamp(-65504, 65504).half().float()
