"""Turn a checkpoint's tensors into the decoder's weights: fuse, check shapes, pack, one layer at a time.

Knows tensor names in the Hugging Face style; where their bytes come from is the checkpoint's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from noria.engine.models.decoder import DecoderWeights
from noria.engine.models.errors import ModelError
from noria.engine.models.spec import ModelSpec
from noria.kernels.ops import LayerWeights, Ops
from noria.kernels.weights import Weight

AnyWeight = TypeVar("AnyWeight", Tensor, Weight)


class Checkpoint(Protocol):
    """A model on disk. Tensors are named as Hugging Face's Llama names them, with q and k in half-rotation order."""

    label: str  # the file or folder, for messages

    def spec(self) -> ModelSpec:
        """The model's shape, from the headers alone."""

    def num_bytes(self, name: str) -> int:
        """Bytes of the tensor on disk; 0 when there is no such tensor."""

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """The tensor's values in float32, in memory of their own. KeyError when there is no such tensor. Of `rows` and
        `columns` alone where they are given: no more is read."""

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        """A matrix as precisely as the file holds it: `tensor`, or integers in groups where they are that. Raises
        ModelError for columns that would cut a group."""


class Ends(NamedTuple):
    """Which ends of the stack a pipeline stage has beside its layers: the embedding, and final norm and output head."""

    first: bool = True
    last: bool = True


BOTH_ENDS = Ends()


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
    hidden, vocab = spec.hidden_size, spec.vocab_size
    embedding, norm, head = None, None, None
    if ends.first or (ends.last and spec.tied):
        table = reader.weight("model.embed_tokens.weight", (vocab, hidden))
    layers = [_build_layer(spec, reader, f"model.layers.{index}.") for index in range(spec.num_layers)]
    if ends.last:
        norm = reader.norm("model.norm.weight", hidden)
        head = ops.pack_linear([table if spec.tied else reader.weight("lm_head.weight", (vocab, hidden))])
    if ends.first:
        embedding = ops.pack_table(table, head if spec.tied else None)
    return DecoderWeights(embedding, layers, norm, head)


def tensor_names(spec: ModelSpec, ends: Ends = BOTH_ENDS) -> list[str]:
    """Every tensor that `build_weights` reads."""
    names = ["model.embed_tokens.weight"] if ends.first or (ends.last and spec.tied) else []
    if ends.last:
        names += ["model.norm.weight"] + ([] if spec.tied else ["lm_head.weight"])
    attention = ("q_proj", "k_proj", "v_proj")
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        names += [f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"]
        for part, biased in [
            *((f"self_attn.{name}", spec.qkv_bias) for name in attention),
            ("self_attn.o_proj", spec.output_bias),
            *((f"mlp.{name}", spec.ffn_bias) for name in ("gate_proj", "up_proj", "down_proj")),
        ]:
            names += [f"{layer}{part}.weight"] + ([f"{layer}{part}.bias"] if biased else [])
    return names


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
        self._total = sum(checkpoint.num_bytes(name) for name in tensor_names(spec, ends))
        self._done = 0

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checked(name, shape, self._checkpoint.tensor)

    def norm(self, name: str, width: int) -> Tensor:
        return self._ops.pack_norm(self.read(name, (width,)))

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        return self._checked(name, shape, self._checkpoint.weight)

    def _checked(self, name: str, shape: tuple[int, ...], get: Callable[[str], AnyWeight]) -> AnyWeight:
        try:
            tensor = get(name)
        except KeyError as error:
            raise ModelError(f"{self._checkpoint.label}: tensor {name} is missing") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._checkpoint.label}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        self._done += self._checkpoint.num_bytes(name)
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor

    def linear(self, parts: list[tuple[str, int]], in_features: int, bias: bool) -> Any:
        """The named projections (name, out features), stacked in order into one packed linear."""
        weights = [self.weight(f"{name}.weight", (out, in_features)) for name, out in parts]
        biases = [self.read(f"{name}.bias", (out,)) for name, out in parts] if bias else []
        return self._ops.pack_linear(weights, torch.cat(biases) if bias else None)


def _build_layer(spec: ModelSpec, reader: _TensorReader, prefix: str) -> LayerWeights:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return LayerWeights(
        attention_norm=reader.norm(f"{prefix}input_layernorm.weight", hidden),
        qkv=reader.linear(
            [(f"{attention}q_proj", queries), (f"{attention}k_proj", keys), (f"{attention}v_proj", keys)],
            hidden,
            spec.qkv_bias,
        ),
        output=reader.linear([(f"{attention}o_proj", hidden)], queries, spec.output_bias),
        ffn_norm=reader.norm(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=reader.linear([(f"{mlp}gate_proj", ffn), (f"{mlp}up_proj", ffn)], hidden, spec.ffn_bias),
        down=reader.linear([(f"{mlp}down_proj", hidden)], ffn, spec.ffn_bias),
    )
