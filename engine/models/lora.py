"""A PEFT folder with a LoRA adapter, laid out for the model that it was trained on.

Knows the adapter's file and the model's names of linears; not who uses the adapter.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from noria.engine.memory import available, show_size
from noria.engine.models.build import rotary_order
from noria.engine.models.errors import ModelError
from noria.engine.models.hf_places import hf_place
from noria.engine.models.lora_config import CONFIG_FILE, LoraConfig, read_config
from noria.engine.models.places import Place as FilePlace
from noria.engine.models.safetensors_checkpoint import check_regular
from noria.engine.models.spec import ModelSpec, tensor_shapes
from noria.kernels.low_rank import LowRank, Place
from noria.kernels.ops import Ops

WEIGHTS_FILE = "adapter_model.safetensors"

_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""What a decoder's packed linears are made of."""

_HF_ARCHITECTURES = {"phi3": "Phi3ForCausalLM", "gptneox": "GPTNeoXForCausalLM", "gpt2": "GPT2LMHeadModel"}
"""Whose names adapters go by where the model is a GGUF file of an architecture that does not use Llama's."""

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Adapter:
    """`digest` is that of its files: equal ones compute the same."""

    pairs: Mapping[Place, LowRank]
    packed: Any | None  # all of them, as `Ops.pack_low_ranks` laid them out
    digest: str
    num_bytes: int  # of its tensors, laid out


def load_adapter(folder: Path, spec: ModelSpec, ops: Ops) -> Adapter:
    """Read the adapter and lay it out for `ops`; another thread may be computing with them. Raises ModelError, naming
    the file, for one that is broken, is not for this model, or needs what is not supported."""
    config, digest = read_config(folder), digest_of(folder)
    file = _AdapterFile(folder, config, spec)
    pairs, num_bytes = {}, 0
    for place, down, up in file.pairs():
        pairs[place] = LowRank(ops.pack_linear([down]), ops.pack_linear([up]))
        num_bytes += 4 * (down.numel() + up.numel())
    file.refuse_rest()
    if digest_of(folder) != digest:
        raise ModelError(f"{folder}: the adapter's files change while they are read")
    return Adapter(pairs, ops.pack_low_ranks(pairs, spec.num_layers), digest, num_bytes)


def describe(folder: Path) -> tuple[LoraConfig, int, int]:
    """What an adapter's files say without its model: settings, matrices, numbers in them. Raises ModelError."""
    config = read_config(folder)
    digest_of(folder)  # tells what cannot be read
    path = folder / WEIGHTS_FILE
    file, sizes = _opened(path), []
    for name in file.keys():  # noqa: SIM118 - no mapping
        tensor = file.get_tensor(name)
        _check_finite(path, name, tensor)
        sizes.append(tensor.numel())
    return config, len(sizes), sum(sizes)


def _check_finite(path: Path, name: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{path}: tensor {name} holds NaN or infinity")


def digest_of(folder: Path) -> str:
    """Of the adapter's two files. Raises ModelError where one cannot be read."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            check_regular(folder / name)
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ModelError(f"{folder / name}: cannot be read: {error.strerror}{_pickled(folder)}") from None
    return digest.hexdigest()[:32]


def _pickled(folder: Path) -> str:
    return " (adapter_model.bin is not read: save it as safetensors)" if (folder / "adapter_model.bin").exists() else ""


class _AdapterFile:
    """The tensors of one adapter against the linears of one model."""

    def __init__(self, folder: Path, config: LoraConfig, spec: ModelSpec) -> None:
        self._path = folder / WEIGHTS_FILE
        self._config = config
        self._spec = spec
        self._names = replace(spec, architecture=_HF_ARCHITECTURES.get(spec.architecture, spec.architecture))
        self._shapes = tensor_shapes(spec)
        self._rotary = rotary_order(spec)
        room, size = available(), self._path.stat().st_size
        if size > room:
            raise ModelError(f"{self._path}: {show_size(size)} do not fit into the {show_size(room)} that are free")
        self._file = _opened(self._path)
        names: list[str] = list(self._file.keys())
        self._tensors = {_plain(name): name for name in names}
        self._used: set[str] = set()

    def pairs(self) -> Iterator[tuple[Place, Tensor, Tensor]]:
        """Both matrices of each packed linear that the adapter is on, [r, C] and [O, r]."""
        for layer in range(self._spec.num_layers):
            for name, parts in _PARTS.items():
                tensors = [f"model.layers.{layer}.{part}.weight" for part in parts]
                # A layer of experts has no such linears; one without a gate has but one of the two.
                found = self._packed(layer, [tensor for tensor in tensors if tensor in self._shapes])
                if found is not None:
                    yield (layer, name), *found

    def refuse_rest(self) -> None:
        """Raises ModelError where the file holds what no linear of ours took, and where there was nothing to take."""
        for name in sorted(self._tensors.keys() - self._used):
            raise ModelError(f"{self._path}: tensor {self._tensors[name]}: {self._why_not(name)}")
        if not self._used:
            raise ModelError(f"{self._path}: there is no tensor in it")

    def _packed(self, layer: int, tensors: list[str]) -> tuple[Tensor, Tensor] | None:
        """Of linears that stand one below the other: their first matrices likewise, their second ones on a diagonal,
        so that one pair does for all. Linears that are one in the file share its first matrix."""
        places = [hf_place(self._names, name) for name in tensors]
        modules = [place.name.removesuffix(".weight") for place in places]
        outputs = Counter[str]()
        for name, module in zip(tensors, modules, strict=True):
            outputs[module] += self._shapes[name][0]
        columns = self._shapes[tensors[0]][1] if tensors else 0
        found = {module: self._pair(module, layer, columns, outputs[module]) for module in outputs}
        pairs = {module: pair for module, pair in found.items() if pair is not None}
        if not pairs:
            return None
        starts = dict(zip(pairs, accumulate((len(down) for down, _ in pairs.values()), initial=0), strict=False))
        down = torch.cat([down for down, _ in pairs.values()])
        up = torch.zeros(outputs.total(), len(down))
        first = 0
        for name, place, module in zip(tensors, places, modules, strict=True):
            rows = self._shapes[name][0]
            if module in pairs:
                own = self._ordered(name, _of_place(place, pairs[module][1]))
                up[first : first + rows, starts[module] : starts[module] + own.shape[1]] = own
            first += rows
        return down, up

    def _pair(self, module: str, layer: int, columns: int, outputs: int) -> tuple[Tensor, Tensor] | None:
        """Both matrices of a linear of the file, [r, columns] and [outputs, r], with the scale in the second one."""
        wanted = self._config.targets(module, layer)
        names = [f"{module}{end}" for end in (_DOWN, _UP)]
        present = [name for name in names if name in self._tensors]
        if not present and not wanted:
            return None
        if not wanted and self._config.target_modules is not None:
            raise ModelError(f"{self._path}: tensor {present[0]}: target_modules do not name it")
        rank = self._config.rank(module)
        down, up = self._read(names[0], (rank, columns)), self._read(names[1], (outputs, rank))
        up.mul_(self._config.scale(module))
        if not bool(up.isfinite().all()):
            raise ModelError(f"{self._path}: tensor {names[1]} times its scale is beyond float32")
        return down, up

    def _ordered(self, name: str, up: Tensor) -> Tensor:
        """Rows of queries and keys in the order in which the decoder keeps a head's channels."""
        order = self._rotary
        if order is None or name.rsplit(".", 2)[-2] not in ("q_proj", "k_proj"):
            return up
        return up.view(-1, len(order), up.shape[1]).index_select(1, order).view(up.shape)

    def _read(self, name: str, shape: tuple[int, int]) -> Tensor:
        """float32, of this shape."""
        if name not in self._tensors:
            raise ModelError(f"{self._path}: tensor {_PREFIX}{name} is missing")
        self._used.add(name)
        try:
            found: Tensor = self._file.get_tensor(self._tensors[name])
        except SafetensorError as error:
            raise ModelError(f"{self._path}: tensor {name} cannot be read: {error}") from None
        if tuple(found.shape) != shape:
            trained_on = self._config.base_model_name_or_path
            whose = f" (the adapter was trained on {trained_on})" if trained_on else ""
            raise ModelError(
                f"{self._path}: tensor {name} has shape {list(found.shape)}, this model needs {list(shape)}{whose}"
            )
        if not found.is_floating_point():
            raise ModelError(f"{self._path}: tensor {name} holds {found.dtype}: not supported")
        values = found.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        _check_finite(self._path, name, values)
        return values

    def _why_not(self, name: str) -> str:
        layer = _LAYER.search(name)
        if "lora_embedding" in name or "embed" in name or name.startswith(("wte", "transformer.wte")):
            return "adapters of embeddings are not supported"
        if "lm_head" in name or "embed_out" in name:
            return "adapters of the output head are not supported"
        if layer is not None and int(layer[1]) >= self._spec.num_layers:
            return f"there is no such layer: the model has {self._spec.num_layers}"
        if "lora_magnitude_vector" in name:
            return "DoRA is not supported"
        if ".experts." in name or ".router" in name or name.endswith((f".gate{_DOWN}", f".gate{_UP}")):
            return "adapters of experts and their routers are not supported"
        if name.endswith(".bias"):
            return "trained biases are not supported"
        if name.endswith((_DOWN, _UP)):
            return "the model has no such linear layer"
        return "this is no part of a LoRA adapter"


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: broken or truncated safetensors file ({error})") from None


def _of_place(place: FilePlace, up: Tensor) -> Tensor:
    """The rows that the model's tensor has of the file's."""
    return place.pick(up) if place.pick is not None else up[place.rows(slice(None), len(up))]


def _plain(name: str) -> str:
    """The tensor's name as the text model's modules have it."""
    return name.removeprefix(_PREFIX).replace("model.language_model.", "model.")
