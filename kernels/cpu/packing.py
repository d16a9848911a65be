"""Lays weights out as packed.h says: exactly as their files have them, floats in two bytes where that changes none.

Knows the kinds of layout and who fills them; not what is computed with them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noria.kernels.cpu.pages import HugePages
from noria.kernels.cpu.structs import Linear, Segment
from noria.kernels.weights import GroupedWeight, Part, Weight, as_floats, pieces

F32, F16, BF16, Q4, Q8, Q4_F32, Q8_16 = range(7)  # as in packed.h

_HALVES = {F16: torch.float16, BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """`record` is what C is given; its segments point into `tensors`, which are kept alive here."""

    record: Linear
    segments: Any  # an array of Segment
    tensors: list[Tensor]
    out_features: int
    in_features: int


class _Unfit(Exception):
    """A weight has rows that its kind cannot hold."""


def pack(library: ctypes.CDLL, memory: HugePages, parts: Sequence[Part], bias: Tensor | None) -> PackedLinear:
    """See `Ops.pack_linear`. A run of parts of one kind makes a segment."""
    # The first rows of a streamed weight tell its kind, nearly always: only where they were wrong, all are read before.
    try:
        return _packed(library, memory, parts, [_kind(next(pieces(part))) for part in parts], bias)
    except _Unfit:
        return _packed(library, memory, parts, [_kind(part) for part in parts], bias)


def _packed(
    library: ctypes.CDLL, memory: HugePages, parts: Sequence[Part], kinds: list[int], bias: Tensor | None
) -> PackedLinear:
    in_features = parts[0].shape[1]
    tensors = [] if bias is None else [bias]
    segments: list[Segment] = []
    done = 0
    for kind, pairs in itertools.groupby(zip(kinds, parts, strict=True), lambda pair: pair[0]):
        run = [part for _, part in pairs]
        out = sum(part.shape[0] for part in run)
        data = memory.zeros(library.noria_packed_bytes(kind, out, in_features))
        _fill(library, data, kind, run)
        tensors.append(data)
        segments.append(Segment(data.data_ptr(), None if bias is None else bias.data_ptr() + 4 * done, kind, out))
        done += out
    array = (Segment * len(segments))(*segments)
    return PackedLinear(Linear(array, len(segments), in_features, done), array, tensors, done, in_features)


def _fill(library: ctypes.CDLL, data: Tensor, kind: int, parts: list[Part]) -> None:
    """Raises _Unfit."""
    first = 0
    for part in parts:
        for number, piece in enumerate(pieces(part)):
            if number and not _holds(kind, piece):  # of the first one it is known
                raise _Unfit
            _fill_rows(library, data, kind, first, piece)
            first += piece.shape[0]


def _fill_rows(library: ctypes.CDLL, data: Tensor, kind: int, first: int, piece: Weight) -> None:
    count, in_features = piece.shape
    if isinstance(piece, GroupedWeight):
        q, scale, minimum = _regrouped(piece, kind)
        lowest = None if minimum is None else minimum.data_ptr()
        library.noria_pack_groups(
            kind, q.data_ptr(), scale.data_ptr(), lowest, first, count, in_features, data.data_ptr()
        )
    else:
        floats = as_floats(piece).contiguous()
        library.noria_pack_floats(kind, floats.data_ptr(), first, count, in_features, data.data_ptr())


def _kind(weight: Part) -> int:
    """How a weight is kept: as its file has it; floats in two bytes where that changes none of them."""
    first = next(pieces(weight))
    if isinstance(first, GroupedWeight):
        if first.minimum is not None:
            return Q4 if first.half_scales else Q4_F32
        return Q8 if first.half_scales and first.group_size == 32 else Q8_16
    return next((kind for kind in _HALVES if all(_holds(kind, piece) for piece in pieces(weight))), F32)


def _holds(kind: int, rows: Weight) -> bool:
    """Whether the kind has room for every value."""
    if kind not in _HALVES:
        return True
    floats = torch.split(as_floats(rows), 4096)  # a large table need not be there three times over
    return all(torch.equal(some.to(_HALVES[kind]).to(some.dtype), some) for some in floats)


def _regrouped(weight: GroupedWeight, kind: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The integers, and scales for groups of the kind's size."""
    times = weight.group_size // (16 if kind == Q8_16 else 32)

    def spread(scales: Any) -> Any:
        return scales if scales is None or times == 1 else scales.repeat_interleave(times, dim=1).contiguous()

    return weight.q.contiguous(), spread(weight.scale.contiguous()), spread(weight.minimum)
