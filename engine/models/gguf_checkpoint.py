"""A GGUF file as a checkpoint: its tensors under the model's names, in the model's order, as precisely as it has them.

Knows how to read a place; what stands where is `gguf_places`' and `gguf_spec`'s, the container `gguf_file`'s.
"""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor

from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_groups import read_groups
from noria.engine.models.gguf_places import gguf_place
from noria.engine.models.gguf_spec import read_spec
from noria.engine.models.places import Place
from noria.engine.models.spec import ModelSpec, tensor_shapes
from noria.kernels.weights import Weight


class GGUFCheckpoint:
    """See `build.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self.file = GGUFFile(path)
        try:
            self._spec = read_spec(self.file)
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise ModelError(f"{path}: broken metadata ({error!r})") from error
        self._shapes = tensor_shapes(self._spec)

    def spec(self) -> ModelSpec:
        return self._spec

    def num_bytes(self, name: str) -> int:
        place = self.file.tensors.get(gguf_place(self._spec, name).name)
        if place is None:
            return 0
        # A row's bytes, since of a fused tensor a part may be meant.
        shape = self._shapes[name]
        rows = math.prod(shape[:-1]) if place.shape[-1] == shape[-1] else math.prod(place.shape[:-1])
        return place.nbytes // math.prod(place.shape[:-1]) * rows

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        place = gguf_place(self._spec, name)
        values = self.file.dequantize(place.name, self._rows(place, rows), columns)
        self.file.release(place.name)
        return values if place.order is None else place.order(values)

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        place = gguf_place(self._spec, name)
        grouped = read_groups(self.file, place.name, self._rows(place, rows), columns)
        if grouped is None:
            return self.tensor(name, rows, columns)
        self.file.release(place.name)
        return grouped if place.order is None else grouped.rows(place.order)

    def _rows(self, place: Place, wanted: slice) -> slice:
        """KeyError where the tensor is missing."""
        shape = self.file.tensors[place.name].shape
        if not place.count:
            return wanted
        try:
            return place.rows(wanted, math.prod(shape[:-1] if len(shape) > 1 else shape))
        except ValueError as error:
            raise ModelError(f"{self.label}: tensor {place.name} has shape {list(shape)}: no {error}") from error
