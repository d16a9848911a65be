"""Low-rank adapters over a decoder's packed linears: each adds two thin products to its own tokens.

Knows rows of a step and packed weights; no file, no name of an adapter, no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from noria.kernels.layers import LayerWeights
from noria.kernels.ops import Ops, Packed

Place = tuple[int, str]
"""A linear of a model: the number of its layer, and its field of `LayerWeights`."""

LINEARS = ("qkv", "output", "gate_up", "down")
"""The linears of a layer that adapters may add to."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A packed linear that adapters may add to."""

    packed: Packed
    place: Place


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to what a linear gives: up(down(x))."""

    down: Packed  # [r, C]
    up: Packed  # [O, r]; the adapter's scale is in it


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Tokens `start` to `stop` of a step, which one adapter serves."""

    pairs: Mapping[Place, LowRank]
    packed: Any | None  # as `Ops.pack_low_ranks` laid it out
    start: int
    stop: int


class AdaptedOps:
    """See `ops.Ops`: as `inner`, but that the outputs of slots get what the adapters add, to their own tokens alone.

    An adapter's products are the backend's own, and are added in a rounding of their own: a token's bits depend on its
    batch no more than they do without adapters. The C kernels do the same in their layers (`cpu/layers.c`).
    """

    def __init__(self, inner: Ops, adapted: Sequence[AdaptedRows]) -> None:
        self._inner = inner
        self._adapted = adapted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def linear(self, x: Tensor, packed: Packed, add_to: Tensor | None = None) -> Tensor:
        if not isinstance(packed, Slot):
            return self._inner.linear(x, packed, add_to)
        out = self._inner.linear(x, packed.packed, add_to)
        for group in self._adapted:
            pair = group.pairs.get(packed.place)
            if pair is not None:
                own = slice(group.start, group.stop)
                self._inner.linear(self._inner.linear(x[own], pair.down), pair.up, add_to=out[own])
        return out


def with_slots(layers: Sequence[LayerWeights]) -> list[LayerWeights]:
    """The layers with their linears in slots; experts are left as they are."""

    def slotted(index: int, layer: LayerWeights) -> LayerWeights:
        present = {name: getattr(layer, name) for name in LINEARS}
        slots: dict[str, Any] = {n: Slot(packed, (index, n)) for n, packed in present.items() if packed is not None}
        return replace(layer, **slots)

    return [slotted(index, layer) for index, layer in enumerate(layers)]
