"""A Hugging Face folder as a checkpoint: config.json as a ModelSpec, tensors from (sharded) safetensors files.

Knows that folder's layout; the tokenizer's files are `hf_tokenizer`'s.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from noria.engine.models.errors import ModelError
from noria.engine.models.hf_config import READERS, architecture_of, spec_from_config
from noria.engine.models.hf_places import hf_place
from noria.engine.models.places import Place
from noria.engine.models.spec import ModelSpec, tensor_shapes
from noria.kernels.weights import Weight

_QUANTISED = (".qweight", ".qzeros", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".weight.absmax")
"""What stands beside, or in place of, weights that AWQ, GPTQ, FP8 and others have quantised: without it they would be
read as other numbers, should config.json not tell."""

_PREFIXES = ("transformer.",)
"""What a model saved without its head may lack in front of its names."""


def check_regular(path: Path) -> None:
    """Raises ModelError for what is there and no file: to open a pipe, or to read a device, may never end."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: cannot be read: not a regular file")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one when there is no such file. ModelError when it is broken."""
    try:
        check_regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content


def refuse_quantised(folder: Path, config: dict[str, Any]) -> None:
    """Raises ModelError for weights that were quantised by a method of its own."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise ModelError(f"{folder}: quantised checkpoints ({method}) are not supported")


class SafetensorsCheckpoint:
    """See `build.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.label = str(folder)
        self._folder = folder
        self._config = read_json(folder / "config.json")
        if not self._config:
            raise ModelError(f"{folder}: no config.json in the folder")
        self._spec = self._read_spec()
        self._shapes = tensor_shapes(self._spec)
        self._file_by_tensor: dict[str, Any] = {}  # for what the headers say
        self._path_by_tensor: dict[str, Path] = {}
        self._open_files()

    def spec(self) -> ModelSpec:
        return self._spec

    def num_bytes(self, name: str) -> int:
        place = self._place(name)
        file = self._file_by_tensor.get(place.name)
        if file is None:
            return 0
        return _BYTES_BY_DTYPE.get(file.get_slice(place.name).get_dtype(), 4) * math.prod(self._shapes[name])

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        place = self._place(name)
        # Opened anew: what a mapping has read stays in memory as long as the mapping.
        path = self._path_by_tensor[place.name]
        file: Any = safe_open(path, framework="pt")
        piece = file.get_slice(place.name)
        try:
            values = _read(piece, place, rows, columns)
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {place.name} cannot be read: {error}") from error
        except (RuntimeError, ValueError) as error:  # of another shape than its family's
            raise ModelError(f"{path}: tensor {place.name} has shape {piece.get_shape()}: {error}") from error
        if not values.is_floating_point():
            raise ModelError(f"{path}: tensor {place.name} holds {values.dtype}: not supported")
        # Tensors of the file are views of its mapping: the copy lets the mapping go.
        floats = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return floats.add_(place.added) if place.added else floats

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        return self.tensor(name, rows, columns)

    def _place(self, name: str) -> Place:
        place = hf_place(self._spec, name)
        if place.name not in self._file_by_tensor:
            for prefix in _PREFIXES:
                short = place.name.removeprefix(prefix)
                if short in self._file_by_tensor:
                    return replace(place, name=short)
        return place

    def _open_files(self) -> None:
        names = self._named_files() or [path.name for path in self._folder.glob("*.safetensors")]
        if not names:
            raise ModelError(f"{self._folder}: no *.safetensors file in the folder")
        for name in names:
            path = self._folder / name
            try:
                file = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{path}: this shard is missing") from error
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: broken or truncated safetensors file ({error})") from error
            names_in_file = file.keys()  # type: ignore[no-untyped-call]
            for tensor in names_in_file:
                if tensor.endswith(_QUANTISED):
                    raise ModelError(f"{path}: tensor {tensor}: quantised checkpoints are not supported")
            self._file_by_tensor.update(dict.fromkeys(names_in_file, file))
            self._path_by_tensor.update(dict.fromkeys(names_in_file, path))

    def _named_files(self) -> list[str]:
        """Those of the index; none where there is no index."""
        path = self._folder / "model.safetensors.index.json"
        index = read_json(path).get("weight_map") or {}
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            raise ModelError(f"{path}: its weight_map does not give each tensor a file")
        return sorted(set(index.values()))

    def _read_spec(self) -> ModelSpec:
        config = self._config
        try:
            architecture = architecture_of(config)
            if architecture not in READERS:
                raise ModelError(f"{self.label}: architecture {architecture!r} is not supported ({', '.join(READERS)})")
            refuse_quantised(self._folder, config)
            return spec_from_config(config, self._eos_token_ids())
        except KeyError as error:
            raise ModelError(f"{self.label}/config.json: {error} is missing") from error
        except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"{self.label}/config.json: {error}") from error

    def _eos_token_ids(self) -> tuple[int, ...]:
        # generation_config.json names all of them, config.json often the first alone.
        generation = read_json(self._folder / "generation_config.json")
        ids = generation.get("eos_token_id", self._config.get("eos_token_id"))
        return tuple(sorted({int(token) for token in (ids if isinstance(ids, list) else [ids]) if token is not None}))


_BYTES_BY_DTYPE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


def _read(piece: Any, place: Place, rows: slice, columns: slice) -> Tensor:
    """Rows and columns of the model's tensor, no more than needed of the file's unless it must be picked apart."""
    shape = piece.get_shape()
    if place.pick is not None:
        picked = place.pick(piece[:])[rows]
        return picked if len(shape) == 1 else picked[:, columns]
    within = place.rows(rows, shape[1] if place.is_transposed else shape[0])
    values: Tensor
    if len(shape) == 1:
        values = piece[within]
    else:
        values = piece[columns, within].t() if place.is_transposed else piece[within, columns]
    return values if place.order is None else place.order(values)
