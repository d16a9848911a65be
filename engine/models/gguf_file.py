"""A GGUF file, memory-mapped: its metadata, the places of its tensors, and their values as float32.

Reads the container alone and knows no architecture or tokenizer. The `gguf` package's reader builds a numpy view per
string, which takes seconds for a vocabulary; this one takes a tenth of one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from noria.engine.models.errors import ModelError

_FORMATS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "|b1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_CHUNK_VALUES = 1 << 21  # values dequantised at a time: bounds the temporaries to some tens of MB


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies. `shape` is in torch's order (rows first), `offset` counts from the file's start."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file. `metadata` holds Python scalars and strings, lists of strings, and numpy arrays of numbers."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header; ModelError when it is no GGUF file, or is cut short."""
        self.path = path
        try:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        if mapping[:4] != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file")
        try:
            self.metadata, self.tensors = _read_header(memoryview(mapping))
        except (struct.error, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise ModelError(f"{path}: broken or truncated GGUF header ({error})") from error
        self._mapping = mapping
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._check_tensors()

    def raw(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Bytes:
        """The tensor's bytes as the file has them, a row of the tensor in each: a view. `columns` must be whole blocks;
        see `covering`."""
        place = self.tensors[name]
        num_rows = int(np.prod(place.shape[:-1])) if len(place.shape) > 1 else 1
        table = self._bytes[place.offset : place.offset + place.nbytes].reshape(num_rows, -1)
        values, size = block_of(place.kind)
        first, last, _ = columns.indices(place.shape[-1])
        # A vector is one row here, whose columns are what others call its rows.
        return table[rows, first // values * size : last // values * size]

    def covering(self, name: str, columns: slice) -> tuple[slice, slice]:
        """The fewest whole blocks of a row that hold `columns`, and where in them these lie."""
        place = self.tensors[name]
        values, _ = block_of(place.kind)
        first, last, _ = columns.indices(place.shape[-1])
        start = first // values * values
        return slice(start, -(-last // values) * values), slice(first - start, last - start)

    def dequantize(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """The tensor's values, or those of some `rows` and `columns`: float32, in memory of their own."""
        place = self.tensors[name]
        if len(place.shape) == 1:  # a vector lies in one row
            rows, columns = slice(None), rows
        covering, inside = self.covering(name, columns)
        raw = self.raw(name, rows, covering)
        width = covering.stop - covering.start
        values = torch.empty(len(raw), inside.stop - inside.start)
        step = max(1, _CHUNK_VALUES // width)
        for start in range(0, len(raw), step):
            piece = np.ascontiguousarray(raw[start : start + step]).view(_storage(place.kind))
            try:
                chunk = np.array(dequantize(piece, place.kind), dtype=np.float32)
            except NotImplementedError as error:
                raise ModelError(f"{self.path}: tensor {name} is of kind {place.kind.name}: not supported") from error
            values[start : start + step] = torch.from_numpy(chunk[:, inside])
        if len(place.shape) == 1:
            return values[0]
        return values.reshape(place.shape) if values.numel() == np.prod(place.shape) else values

    def release(self, name: str) -> None:
        """The tensor was read: its pages need not stay with this process beside what was made of them."""
        place = self.tensors[name]
        start = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(self._mapping, "madvise"):
            self._mapping.madvise(mmap.MADV_DONTNEED, start, place.offset + place.nbytes - start)

    def _check_tensors(self) -> None:
        size = len(self._bytes)
        for name, place in self.tensors.items():
            if place.offset + place.nbytes > size:
                raise ModelError(
                    f"{self.path}: truncated: tensor {name} ends at byte {place.offset + place.nbytes:,}, "
                    f"the file has {size:,}"
                )


def block_of(kind: GGMLQuantizationType) -> tuple[int, int]:
    """Values in one block of the kind, and the bytes that it takes."""
    sizes: tuple[int, int] = GGML_QUANT_SIZES[kind]
    return sizes


def _storage(kind: GGMLQuantizationType) -> Any:
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return plain.get(kind, np.uint8)


def _read_header(data: memoryview) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    version, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(f"version {version}, only 2 and 3 are known")
    cursor = _Cursor(data, 24)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.number("<u4")))
    infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: TensorPlace(shape, kind, start + offset, _num_bytes(shape, kind)) for name, shape, kind, offset in infos
    }
    return metadata, tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    num_dims = cursor.number("<u4")
    if not 1 <= num_dims <= 4:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    dims = [int(cursor.number("<u8")) for _ in range(num_dims)]
    if min(dims) < 1:
        raise ValueError(f"tensor {name} has an empty dimension")
    kind = GGMLQuantizationType(cursor.number("<u4"))
    return name, tuple(reversed(dims)), kind, int(cursor.number("<u8"))


def _num_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_values, block_bytes = block_of(kind)
    if shape[-1] % block_values:
        raise ValueError(f"rows of {shape[-1]} values cannot be {kind.name}")
    values = 1
    for size in shape:
        values *= size
    return values // block_values * block_bytes


class _Cursor:
    """Reads values one after the other; struct.error or ValueError at the end of the data."""

    def __init__(self, data: memoryview, offset: int) -> None:
        self._data = data
        self.offset = offset

    def number(self, numpy_format: str) -> Any:
        item = np.frombuffer(self._data, numpy_format, 1, self.offset)[0]
        self.offset += item.itemsize
        return item.item()

    def string(self) -> str:
        (length,) = _LENGTH(self._data, self.offset)
        end = self.offset + 8 + length
        if end > len(self._data):
            raise ValueError("a string goes past the end of the file")
        text = str(self._data[self.offset + 8 : end], "utf-8", "replace")
        self.offset = end
        return text

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        return self.number(_FORMATS[kind])

    def _array(self) -> Any:
        kind, count = GGUFValueType(self.number("<u4")), int(self.number("<u8"))
        if kind == GGUFValueType.ARRAY:
            return [self._array() for _ in range(count)]
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        numbers = np.frombuffer(self._data, _FORMATS[kind], count, self.offset)
        self.offset += numbers.nbytes
        return numbers


_LENGTH: Callable[[memoryview, int], tuple[int]] = struct.Struct("<Q").unpack_from
