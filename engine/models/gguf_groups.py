"""GGUF's quantised blocks as integers with their scales, so that kernels can compute on what the file holds.

Knows the block formats of ggml (ggml-common.h) that are common on disk; the others are dequantised by `gguf_file`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_file import GGUFFile
from noria.kernels.weights import GroupedWeight

Blocks = np.ndarray[Any, np.dtype[np.uint8]]
"""[O, blocks in a row, bytes of a block]"""


def read_groups(
    file: GGUFFile, name: str, rows: slice = slice(None), columns: slice = slice(None)
) -> GroupedWeight | None:
    """A matrix [O, C] as groups, or None for a kind that is not kept so. KeyError when there is no such tensor,
    ModelError for columns that would cut a group."""
    place = file.tensors[name]
    reader = _READERS.get(place.kind)
    if reader is None or len(place.shape) < 2:
        return None
    read, block_bytes = reader
    covering, inside = file.covering(name, columns)
    raw = np.ascontiguousarray(file.raw(name, rows, covering))
    grouped = read(raw.reshape(len(raw), -1, block_bytes))
    try:
        return grouped.columns(inside.start, inside.stop)
    except ValueError as error:
        raise ModelError(f"{file.path}: tensor {name}: {error}") from None


def _q4_0(blocks: Blocks) -> GroupedWeight:
    scale = _halves(blocks[..., :2])
    return _weight(_nibbles(blocks[..., 2:]), scale, -8.0 * scale, half_scales=True)


def _q4_1(blocks: Blocks) -> GroupedWeight:
    return _weight(_nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]), half_scales=True)


def _q5_0(blocks: Blocks) -> GroupedWeight:
    """The fifth bits of a group's 32 values stand in 4 bytes of their own."""
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    q = (_nibbles(blocks[..., 6:]) | high << 4).astype(np.int8) - 16
    return _weight(q, _halves(blocks[..., :2]), None, half_scales=True)


def _q8_0(blocks: Blocks) -> GroupedWeight:
    return _weight(blocks[..., 2:].view(np.int8), _halves(blocks[..., :2]), None, half_scales=True)


def _q4_k(blocks: Blocks) -> GroupedWeight:
    """256 values: 8 groups of 32, whose 6-bit scales and minima are packed into 12 bytes."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6) << 4), axis=-1)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 6) << 4), axis=-1)
    # Each 32 bytes hold a group in their low nibbles and the next one in their high nibbles.
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    q = np.concatenate((pairs & 15, pairs >> 4), axis=-2)
    scale = _halves(blocks[..., 0:2]) * scales.astype(np.float32)
    minimum = -(_halves(blocks[..., 2:4]) * minima.astype(np.float32))
    return _weight(q, scale, minimum, half_scales=False)


def _q6_k(blocks: Blocks) -> GroupedWeight:
    """256 values: 16 groups of 16 with signed scales; 4 bits of each value in one place and 2 in another."""
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 2, 32)  # half of the block, 32 of 64 bytes
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    nibbles = np.stack((low[..., 0, :] & 15, low[..., 1, :] & 15, low[..., 0, :] >> 4, low[..., 1, :] >> 4), axis=-2)
    upper = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    q = (nibbles | upper << 4).astype(np.int8) - 32
    scale = _halves(blocks[..., 208:210]) * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return _weight(q, scale, None, half_scales=False)


def _nibbles(packed: Blocks) -> Blocks:
    """The first half of a group lies in the low nibbles, the second in the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _halves(two_bytes: Blocks) -> Any:
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)


def _weight(q: Any, scale: Any, minimum: Any, *, half_scales: bool) -> GroupedWeight:
    rows = len(q)

    def tensor(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(rows, -1)))

    return GroupedWeight(tensor(q), tensor(scale), None if minimum is None else tensor(minimum), half_scales)


_READERS: dict[GGMLQuantizationType, tuple[Callable[[Blocks], GroupedWeight], int]] = {
    GGMLQuantizationType.Q4_0: (_q4_0, 18),
    GGMLQuantizationType.Q4_1: (_q4_1, 20),
    GGMLQuantizationType.Q5_0: (_q5_0, 22),
    GGMLQuantizationType.Q8_0: (_q8_0, 34),
    GGMLQuantizationType.Q4_K: (_q4_k, 144),
    GGMLQuantizationType.Q6_K: (_q6_k, 210),
}
