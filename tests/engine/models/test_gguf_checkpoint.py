"""Reading GGUF files: values and headers against the gguf package, and one clear line for every broken file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from noria.engine.models.build import build_weights, tensor_names
from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.source import resolve
from noria.kernels.torch_ops import TorchOps

HIDDEN, FFN, VOCAB, HEADS = 32, 64, 40, 4


def tiny_writer(path: Path, architecture: str = "llama", **skip: bool) -> gguf.GGUFWriter:
    """A one-layer model with every tensor that a llama file has."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,)}
    shapes |= {"blk.0.ffn_norm": (HIDDEN,), "blk.0.ffn_down": (HIDDEN, FFN)}
    shapes |= {f"blk.0.attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (FFN, HIDDEN) for part in ("gate", "up")}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        if not skip.get(name.replace(".", "_")):
            writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32))
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_header_and_values_equal_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["ä", "", "b"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_bool("flag", True)
    writer.add_float64("double", 0.1)
    values = np.random.default_rng(1).standard_normal((6, 256)).astype(np.float32)
    kinds = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    for kind in kinds:
        raw = gguf.quants.quantize(values, GGMLQuantizationType[kind])
        writer.add_tensor(kind, raw, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    assert file.metadata["words"] == ["ä", "", "b"] and file.metadata["numbers"].tolist() == [1, -2, 3]
    assert file.metadata["flag"] is True and file.metadata["double"] == 0.1
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        actual = file.dequantize(tensor.name)
        assert actual.dtype == torch.float32 and actual.shape == (6, 256)
        np.testing.assert_array_equal(actual.numpy(), np.asarray(expected, np.float32).reshape(6, 256))
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors) == kinds


def test_demo_headers() -> None:
    spec = GGUFCheckpoint(resolve("smollm2-135m-instruct").path).spec()
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert spec.vocab_size == 49152 and spec.max_len == 8192 and spec.tied
    assert spec.layers[0].rope is not None and spec.layers[0].rope.base == 100000.0
    assert spec.eos_token_ids == (2,) and spec.num_parameters == 134_515_008


def test_a_tiny_file_is_read_whole_and_progress_ends_at_the_total(tmp_path: Path) -> None:
    finish(tiny_writer(tmp_path / "m.gguf"))
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    seen: list[tuple[int, int]] = []
    build_weights(checkpoint.spec(), checkpoint, TorchOps(), lambda done, total: seen.append((done, total)))
    assert len(seen) == len(tensor_names(checkpoint.spec())) == 11
    assert seen[-1][0] == seen[-1][1] == sum(place.nbytes for place in checkpoint.file.tensors.values())
    assert checkpoint.spec().eos_token_ids == (2, 5) and checkpoint.spec().num_kv_heads == HEADS


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_one_clear_line(tmp_path: Path, keep: float) -> None:
    whole = resolve("smollm2-135m-instruct").path.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ModelError) as caught:
        GGUFCheckpoint(path)
    assert "cut.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_bytes_of_chance_are_one_clear_line(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    finish(tiny_writer(tmp_path / "whole.gguf"))
    whole = (tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "noise.gguf"
    for _ in range(200):
        damaged = bytearray(whole)
        for position in generator.integers(4, 600, size=6):
            damaged[position] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            checkpoint = GGUFCheckpoint(path)
            build_weights(checkpoint.spec(), checkpoint, TorchOps())
        except ModelError as error:
            assert "noise.gguf" in str(error)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    finish(tiny_writer(tmp_path / "m.gguf", blk_0_ffn_up=True))
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf: tensor model\.layers\.0\.mlp\.up_proj\.weight is missing"):
        build_weights(checkpoint.spec(), checkpoint, TorchOps())


def test_other_architectures_and_variants_are_refused_by_name(tmp_path: Path) -> None:
    finish(tiny_writer(tmp_path / "a.gguf", "bloom"))
    with pytest.raises(ModelError, match="architecture 'bloom' is not supported"):
        GGUFCheckpoint(tmp_path / "a.gguf")
    changes: list[tuple[str, Any]] = [
        ("metadata llama.expert_used_count is missing", lambda w: w.add_expert_count(8)),
        ("rope scaling 'longrope'", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)),
        ("different sizes", lambda w: w.add_value_length(4)),
        ("llama with attn_q_norm", lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.zeros(8, np.float32))),
        ("a part of the head", lambda w: w.add_rope_dimension_count(4)),
    ]
    for index, (message, change) in enumerate(changes):
        writer = tiny_writer(tmp_path / f"{index}.gguf")
        change(writer)
        finish(writer)
        with pytest.raises(ModelError, match=message):
            GGUFCheckpoint(tmp_path / f"{index}.gguf")
