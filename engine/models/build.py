"""Turn a checkpoint's tensors into the decoder's weights: fuse, check shapes, pack, one layer at a time.

Knows the model's own tensor names (`spec.tensor_shapes`); where their bytes come from is the checkpoint's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from noria.engine.memory import give_back
from noria.engine.models.decoder import DecoderWeights
from noria.engine.models.errors import ModelError
from noria.engine.models.spec import BOTH_ENDS, Ends, LayerSpec, ModelSpec, tensor_shapes
from noria.kernels.experts import Experts
from noria.kernels.layers import LayerWeights, Norm
from noria.kernels.ops import Ops
from noria.kernels.weights import Part, StreamedWeight, Weight

AnyWeight = TypeVar("AnyWeight", Tensor, Weight)

PIECE_VALUES = 1 << 18
"""About how many values of a matrix are read at a time: what lies between the file and the packed weights takes a few
megabytes, whatever the matrix."""


class Checkpoint(Protocol):
    """A model on disk. Tensors go by the names of `spec.tensor_shapes`, with q and k in half-rotation order."""

    label: str  # the file or folder, for messages

    def spec(self) -> ModelSpec:
        """The model's shape, from the headers alone."""

    def num_bytes(self, name: str) -> int:
        """Bytes of the tensor on disk; 0 when there is no such tensor."""

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """The tensor's values in float32, in memory of their own. KeyError when there is no such tensor. Of `rows` (of
        queries and keys whole heads) and `columns` alone where they are given: no more is read."""

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        """A matrix as precisely as the file holds it: `tensor`, or integers in groups where they are that. Raises
        ModelError for columns that would cut a group."""


def build_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    ops: Ops,
    progress: Callable[[int, int], None] | None = None,
    ends: Ends = BOTH_ENDS,
) -> DecoderWeights:
    """Read every weight of the model and lay it out for `ops`. `progress` gets bytes read and bytes in all.

    Raises ModelError, naming the checkpoint and the tensor, where one is missing or has another shape.
    """
    reader = _TensorReader(spec, checkpoint, ops, progress, ends)
    embedding, positions, head = None, None, None
    if ends.first or (ends.last and spec.tied):
        table = reader.weight("model.embed_tokens.weight")
        if ends.last and spec.tied:
            head = ops.pack_linear([table])
        if ends.first:
            embedding = ops.pack_table(table, head)
        del table
    if ends.last and not spec.tied:
        head = ops.pack_linear([reader.weight("lm_head.weight")])
    if ends.first and spec.num_positions:
        positions = ops.pack_table(reader.read("model.embed_positions.weight"), None)
    layers: list[LayerWeights] = []
    for index, layer in enumerate(spec.layers):
        # What was read for the last layer, and for the tables, which come first for that, left holes among what stays.
        give_back()
        layers.append(_build_layer(spec, layer, reader, f"model.layers.{index}."))
    norm = reader.norm("model.norm")
    return DecoderWeights(embedding, positions, layers, norm, head)


def tensor_names(spec: ModelSpec, ends: Ends = BOTH_ENDS) -> list[str]:
    """Every tensor that `build_weights` reads."""
    return list(tensor_shapes(spec, ends))


class _TensorReader:
    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        ops: Ops,
        progress: Callable[[int, int], None] | None,
        ends: Ends,
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._progress = progress
        self._shapes = tensor_shapes(spec, ends)
        self._rotary = rotary_order(spec)
        self._centred = spec.norm == "layer"
        self._total = sum(checkpoint.num_bytes(name) for name in self._shapes)
        self._done = 0

    def read(self, name: str) -> Tensor:
        return self._ordered(name, self._checked(name, self._checkpoint.tensor))

    def weight(self, name: str) -> Part:
        """A matrix; streamed where it is large, but for those whose rows are put in order head by head."""
        rows, columns = self._shapes[name]
        step = max(1, PIECE_VALUES // columns)
        if rows <= step or name.rsplit(".", 2)[-2] in ("q_proj", "k_proj", "v_proj"):
            return self._ordered(name, self._checked(name, self._checkpoint.weight))

        def rest() -> Iterator[Weight]:
            return (self._piece(name, first, step) for first in range(step, rows, step))

        first = self._piece(name, 0, step)
        self._tell(name)
        return StreamedWeight((rows, columns), first, rest)

    def norm(self, name: str) -> Norm | None:
        """None where the model has no such norm."""
        if f"{name}.weight" not in self._shapes:
            return None
        bias = self._ops.pack_norm(self.read(f"{name}.bias")) if f"{name}.bias" in self._shapes else None
        return Norm(self._ops.pack_norm(self.read(f"{name}.weight")), bias, self._centred)

    def linear(self, *names: str) -> Any:
        """The named projections, stacked in order into one packed linear."""
        weights = [self.weight(f"{name}.weight") for name in names]
        biases = [self.read(f"{name}.bias") for name in names if f"{name}.bias" in self._shapes]
        return self._ops.pack_linear(weights, torch.cat(biases) if biases else None)

    def _piece(self, name: str, first: int, count: int) -> Weight:
        """Rows of a matrix from `first` on."""
        rows, columns = self._shapes[name]
        last = first + count >= rows
        # The last piece is all that the file has left, so that rows too many are found as well.
        wanted = slice(first, None if last else first + count)
        piece = self._found(name, lambda: self._checkpoint.weight(name, wanted))
        if tuple(piece.shape) != (min(count, rows - first), columns):
            self._refuse(name, self._checkpoint.weight(name).shape)
        return piece

    def _checked(self, name: str, get: Callable[[str], AnyWeight]) -> AnyWeight:
        tensor = self._found(name, lambda: get(name))
        if tuple(tensor.shape) != self._shapes[name]:
            self._refuse(name, tensor.shape)
        self._tell(name)
        return tensor

    def _found(self, name: str, get: Callable[[], AnyWeight]) -> AnyWeight:
        try:
            return get()
        except KeyError as error:
            raise ModelError(f"{self._checkpoint.label}: tensor {name} is missing") from error

    def _refuse(self, name: str, shape: Sequence[int]) -> NoReturn:
        expected = list(self._shapes[name])
        raise ModelError(f"{self._checkpoint.label}: tensor {name} has shape {list(shape)}, expected {expected}")

    def _tell(self, name: str) -> None:
        """Of one tensor more."""
        self._done += self._checkpoint.num_bytes(name)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _ordered(self, name: str, weight: AnyWeight) -> AnyWeight:
        """Queries and keys with the channels of each head in `rotary_order`."""
        part = name.rsplit(".", 2)[-2]
        if self._rotary is None or part not in ("q_proj", "k_proj", "q_norm", "k_norm"):
            return weight
        order = self._rotary

        def within_heads(rows: Tensor) -> Tensor:
            return rows.view(-1, len(order), *rows.shape[1:]).index_select(1, order).view(rows.shape)

        return within_heads(weight) if isinstance(weight, Tensor) else weight.rows(within_heads)


def rotary_order(spec: ModelSpec) -> Tensor | None:
    """The order of a head's channels in which pairs are (i, i + D / 2), where only the first ones turn, as pairs
    (i, i + dim / 2); None where all do. Scores do not change when queries and keys are ordered alike."""
    dim, turning = spec.head_dim, spec.rotary_dim
    if turning == dim:
        return None
    channels = torch.arange(dim)
    first, second = channels[: turning // 2], channels[turning // 2 : turning]
    still = channels[turning:].chunk(2)
    return torch.cat((first, still[0], second, still[1]))


def _build_layer(spec: ModelSpec, layer: LayerSpec, reader: _TensorReader, prefix: str) -> LayerWeights:
    attention = f"{prefix}self_attn."
    norms: Sequence[Norm | None] = [reader.norm(f"{attention}{name}_norm") for name in ("q", "k")]
    weights = LayerWeights(
        attention_norm=reader.norm(f"{prefix}input_layernorm"),
        qkv=reader.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v"))),
        output=reader.linear(f"{attention}o_proj"),
        ffn_norm=reader.norm(f"{prefix}post_attention_layernorm"),
        query_norm=norms[0],
        key_norm=norms[1],
        attention_output_norm=reader.norm(f"{prefix}attention_output_norm"),
        ffn_output_norm=reader.norm(f"{prefix}ffn_output_norm"),
        **_build_ffn(spec, layer, reader, f"{prefix}mlp"),
    )
    return weights


def _build_ffn(spec: ModelSpec, layer: LayerSpec, reader: _TensorReader, prefix: str) -> dict[str, Any]:
    def pair(at: str) -> tuple[Any, Any]:
        into = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
        return reader.linear(*(f"{at}.{name}" for name in into)), reader.linear(f"{at}.down_proj")

    if spec.experts is None or not layer.is_sparse:
        gate_up, down = pair(prefix)
        return {"gate_up": gate_up, "down": down}
    router = reader.linear(f"{prefix}.router")
    experts = [pair(f"{prefix}.experts.{number}") for number in range(spec.experts.num)]
    return {"experts": Experts(router, experts, spec.experts.per_token, spec.experts.is_normalised)}
