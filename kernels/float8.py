"""Products in 8-bit floats (e4m3): matrices rounded when they are loaded, activations as they come, each row with a
scale of its own.

torch multiplies; on GPUs that takes compute capability 9.0. Knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
MULTIPLE = 16
"""What rows and columns of a matrix must be a multiple of."""

LARGEST = torch.finfo(DTYPE).max
_SMALLEST = 2.0**-100  # of a scale: rows of zeros stay that


def to_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of [N, C] -> e4m3 [N, C] and float32 [N, 1]: a value is its number times the scale of its row, whose largest
    number fills the range."""
    wide = values.to(torch.float32)
    scale = wide.abs().amax(dim=1, keepdim=True).div_(LARGEST).clamp_(min=_SMALLEST)
    return (wide / scale).clamp_(-LARGEST, LARGEST).to(DTYPE), scale


def float8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, C] times the transpose of weight [O, C], whose rows have scales float32 [1, O], plus the bias [O] -> [T, O]
    in the precision of x. A row of x that is no number gives none."""
    if not len(x):
        return x.new_empty(0, len(weight))
    rounded, own = to_float8(x)
    product = torch._scaled_mm(rounded, weight.t(), scale_a=own, scale_b=scale, out_dtype=x.dtype)
    return product if bias is None else product.add_(bias)
