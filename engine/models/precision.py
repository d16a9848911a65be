"""How precisely a model's weights are kept: as its file has them, or rounded when they are read.

Knows which matrices bear less rounding; the rounding itself is `kernels.quantize`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from noria.engine.models.build import Checkpoint
from noria.engine.models.errors import ModelError
from noria.engine.models.spec import ModelSpec, tensor_shapes
from noria.kernels import float8
from noria.kernels.quantize import GROUP, to_bytes, to_nibbles
from noria.kernels.weights import Float8Weight, GroupedWeight, Weight

Dtype = Literal["auto", "fp32", "fp16", "bf16"]
Quantize = Literal["none", "int8", "q4", "fp8"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
"""Every token's logit comes out of these: they keep 8 bits, or all where others become 8-bit floats."""

ROUTER = ".mlp.router.weight"
"""Decides between experts, and is small: never quantised."""

_BYTES = {"int8": 34 / 32, "q4": 20 / 32, "fp8": 1.0, "fp16": 2.0, "bf16": 2.0, "fp32": 4.0}


@dataclass(frozen=True, slots=True)
class Precision:
    """`dtype` is what floats are rounded to, `quantize` what matrices of floats become. What a file holds as integers
    stays as it is: to round twice costs accuracy and saves little."""

    dtype: Dtype = "auto"
    quantize: Quantize = "none"

    def of(self, name: str, shape: tuple[int, ...], weight: Weight) -> Weight:
        """Rows of the weight of that name and shape as they are to be kept. Raises OverflowError where half precision
        cannot hold them."""
        if not isinstance(weight, Tensor):
            return weight
        if self.quantize == "fp8":
            rounds = name not in TABLES and not name.endswith(ROUTER) and not any(n % float8.MULTIPLE for n in shape)
            return Float8Weight(*float8.to_float8(weight)) if rounds else weight
        if self.quantize != "none" and weight.shape[1] % GROUP == 0 and not name.endswith(ROUTER):
            return _quantised(self.quantize, name)(weight)
        return self.rounded(weight)

    def rounded(self, values: Tensor) -> Tensor:
        """Floats as `dtype` has them, in float32. Raises OverflowError where half precision cannot hold them."""
        if self.dtype in ("auto", "fp32"):
            return values
        kept = values.to(DTYPES[self.dtype]).float()
        if not bool((kept.isfinite() | ~values.isfinite()).all()):
            raise OverflowError(f"{float(values.abs().max()):g} is more than {self.dtype} can hold")
        return kept

    def weight_bytes(self, spec: ModelSpec, stored: int) -> int:
        """About what the weights take, where they take `stored` bytes on disk and are kept no wider."""
        kind = self.quantize if self.quantize != "none" else self.dtype
        return stored if kind == "auto" else min(stored, int(spec.num_parameters * _BYTES[kind]))


AS_STORED = Precision()


def _quantised(kind: Quantize, name: str) -> Callable[[Tensor], GroupedWeight]:
    return to_bytes if kind == "int8" or name in TABLES else to_nibbles


class RoundedCheckpoint:
    """A checkpoint whose weights come as `precision` says; see `build.Checkpoint`."""

    def __init__(self, whole: Checkpoint, precision: Precision) -> None:
        self.label = whole.label
        self._whole = whole
        self._precision = precision
        self._shapes = tensor_shapes(whole.spec())
        self._num_floats = 0  # matrices that the file holds as floats

    def refuse_if_useless(self) -> None:
        """Raises ModelError where, now that all is read, there was nothing to quantise."""
        if self._precision.quantize != "none" and not self._num_floats:
            raise ModelError(f"{self.label}: --quantize {self._precision.quantize}: its weights are integers already")

    def spec(self) -> ModelSpec:
        return self._whole.spec()

    def num_bytes(self, name: str) -> int:
        return self._whole.num_bytes(name)

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        return self._whole.tensor(name, rows, columns)

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        weight = self._whole.weight(name, rows, columns)
        self._num_floats += not isinstance(weight, GroupedWeight)
        try:
            return self._precision.of(name, self._shapes[name], weight)
        except OverflowError as error:
            raise ModelError(f"{self.label}: tensor {name}: {error}") from None
