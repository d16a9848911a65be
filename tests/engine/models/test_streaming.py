"""Large matrices read and laid out some rows at a time: the same bits, whatever their kind, as all at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from noria.engine.models import build
from noria.engine.models.build import build_weights
from noria.engine.models.decoder import DecoderWeights
from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.precision import Precision, RoundedCheckpoint
from noria.engine.models.safetensors_checkpoint import SafetensorsCheckpoint
from noria.engine.models.shards import ShardedCheckpoint
from noria.engine.models.source import resolve
from noria.engine.models.spec import Ends
from noria.engine.parallel import Parallel
from noria.kernels.choice import Sizes, choose
from noria.kernels.cpu.packing import BF16, F16, F32
from noria.kernels.ops import Ops
from noria.kernels.torch_ops import TorchOps
from noria.kernels.weights import GroupedWeight, StreamedWeight, Weight, stacked_floats
from tests.kernels.test_ops import weight_of

ROUNDED = [Precision(), Precision("bf16"), Precision("auto", "int8"), Precision("auto", "q4")]


def in_rows(weight: Weight, step: int) -> StreamedWeight:
    def some(first: int) -> Weight:
        piece: Weight = (
            weight[first : first + step]
            if isinstance(weight, Tensor)
            else weight.rows(lambda rows: rows[first : first + step])
        )
        return piece

    def rest() -> Iterator[Weight]:
        return (some(first) for first in range(step, weight.shape[0], step))

    return StreamedWeight(weight.shape, some(0), rest)


@pytest.fixture(scope="module")
def native() -> Ops:
    return choose("native", Sizes(96, 32, 96, 16), threads=1)


@pytest.mark.parametrize("step", [1, 7, 16, 40])
@pytest.mark.parametrize("kind", ["floats", "halves", "bfloats", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_what_is_packed_by_rows_is_what_is_packed_whole(native: Ops, kind: str, step: int) -> None:
    parts = [weight_of(kind, 120, 96), weight_of(kind, 83, 96), weight_of("q8_0", 50, 96)]
    bias = torch.randn(253)
    whole = native.pack_linear(parts, bias)
    streamed = native.pack_linear([in_rows(parts[0], step), parts[1], in_rows(parts[2], step)], bias)
    assert [(s.kind, s.out) for s in streamed.segments] == [(s.kind, s.out) for s in whole.segments]
    assert all(torch.equal(*pair) for pair in zip(streamed.tensors, whole.tensors, strict=True))
    table = TorchOps().pack_table(in_rows(parts[0], step), None)
    assert torch.equal(table, TorchOps().pack_table(parts[0], None))


@pytest.mark.parametrize(
    ("first", "later", "kind"), [(1.0, 2.0**-30, BF16), (1.0, 1.1, F32), (2.0**-30, 1.0 + 2.0**-10, F32)]
)
def test_later_rows_that_the_kind_of_the_first_cannot_hold(native: Ops, first: float, later: float, kind: int) -> None:
    """Whatever the first rows make likely, none is rounded."""
    weight = torch.full((40, 96), first)
    halves = weight_of("halves", 20, 96)
    weight[33, 5] = later
    whole, streamed = native.pack_linear([halves, weight]), native.pack_linear([halves, in_rows(weight, 16)])
    assert [segment.kind for segment in streamed.segments] == [F16, kind]
    assert all(torch.equal(*pair) for pair in zip(streamed.tensors, whole.tensors, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 301, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    path = tmp_path_factory.mktemp("streamed")
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3, num_key_value_heads=3)).save_pretrained(path)
    return path


def packed(weights: DecoderWeights) -> list[Tensor]:
    layers = [linear for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [tensor for linear in (weights.embedding, weights.head, *layers) if linear for tensor in linear.tensors]


@pytest.mark.parametrize("parallel", [Parallel(0, 1, 1), Parallel(2, 3, 1)], ids=["whole", "shard"])
@pytest.mark.parametrize("precision", ROUNDED, ids=lambda p: f"{p.dtype}-{p.quantize}")
def test_a_model_read_by_rows_is_the_model(
    folder: Path, native: Ops, precision: Precision, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = RoundedCheckpoint(ShardedCheckpoint(SafetensorsCheckpoint(folder), parallel), precision)
    whole = packed(build_weights(checkpoint.spec(), checkpoint, native))
    monkeypatch.setattr(build, "PIECE_VALUES", 96 * 17)
    told: list[tuple[int, int]] = []
    streamed = packed(build_weights(checkpoint.spec(), checkpoint, native, lambda *read: told.append(read)))
    assert len(whole) >= 10 and all(torch.equal(*pair) for pair in zip(streamed, whole, strict=True))
    assert told == sorted(told) and told[-1][0] == told[-1][1]


def test_blocks_of_a_file_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = ShardedCheckpoint(GGUFCheckpoint(resolve("smollm2-135m-instruct").path), Parallel(5, 1, 6))
    ops = choose("native", Sizes(576, 64, 1536, 16), threads=1)
    ends = Ends(first=False, last=False)
    whole = packed(build_weights(checkpoint.spec(), checkpoint, ops, ends=ends))
    monkeypatch.setattr(build, "PIECE_VALUES", 576 * 100)
    streamed = packed(build_weights(checkpoint.spec(), checkpoint, ops, ends=ends))
    assert whole and all(torch.equal(*pair) for pair in zip(streamed, whole, strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(300, 96), (302, 96), (301, 95)])
def test_a_matrix_of_another_shape_is_named(
    folder: Path, native: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.zeros(rows, columns)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    monkeypatch.setattr(build, "PIECE_VALUES", 96 * 17)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with pytest.raises(ModelError, match=rf"lm_head.weight has shape \[{rows}, {columns}\], expected \[301, 96\]"):
        build_weights(checkpoint.spec(), checkpoint, native)


def test_streamed_floats_stack() -> None:
    floats, groups = weight_of("floats", 20, 96), weight_of("q4_k", 30, 96)
    assert isinstance(groups, GroupedWeight) and isinstance(floats, Tensor)
    stacked = stacked_floats([in_rows(groups, 7), floats])
    assert torch.equal(stacked, torch.cat((groups.floats(), floats)))
