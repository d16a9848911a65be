"""Blocks as integers and scales hold the very values that the gguf package dequantises."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_groups import read_groups
from noria.kernels.choice import Sizes, choose

KINDS = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"]


def file_with(path: Path, kind: GGMLQuantizationType, rows: int, width: int) -> GGUFFile:
    """A file with one matrix of blocks of chance, whose half-precision scales are sane numbers."""
    values, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(4).integers(0, 256, (rows, width // values, size), dtype=np.uint8)
    halves = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for place in halves:
        chance = np.random.default_rng(place).uniform(-1, 1, raw.shape[:2]).astype(np.float16)
        raw[..., place : place + 2] = chance.view(np.uint8).reshape(*raw.shape[:2], 2)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw.reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("name", KINDS)
def test_groups_are_the_values_of_the_file(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    file = file_with(tmp_path / "w.gguf", kind, 40, 512)
    weight = read_groups(file, "w")
    assert weight is not None and weight.shape == (40, 512)
    expected = torch.from_numpy(np.array(dequantize(file.raw("w"), kind)))
    torch.testing.assert_close(weight.floats(), expected, rtol=1e-6, atol=1e-7)
    turned = weight.rows(lambda rows: rows.flip(0))
    torch.testing.assert_close(turned.floats(), expected.flip(0), rtol=1e-6, atol=1e-7)
    ops = choose("native", Sizes(512, 64, 96, 16), threads=1)
    table = ops.pack_table(weight, None)
    assert torch.equal(ops.embed(table, torch.arange(40)), weight.floats())


def test_other_kinds_are_left_to_be_dequantised(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_tensor("w", np.zeros((4, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_groups(GGUFFile(tmp_path / "w.gguf"), "w") is None
