"""Some of the broken folders of the bench, and the whole one that they are made of."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import pytest

from bench.fuzz_folder import faults, read_whole, write_whole
from bench.fuzz_gguf import write_small
from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint


def test_the_whole_folder_is_a_model(tmp_path: Path) -> None:
    write_whole(tmp_path / "whole")
    read_whole(tmp_path / "whole")


def test_a_broken_folder_is_a_model_or_one_clear_line(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    assert list(faults(tmp_path, 120, 5, outcomes)) == []
    assert outcomes["read"] > 10 and outcomes["refused"] > 60


def test_layers_without_end_are_refused_before_they_are_counted_out(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    write_small(path)
    content = bytearray(path.read_bytes())
    key = b"llama.block_count"
    struct.pack_into("<I", content, content.find(key) + len(key) + 4, 2**32 - 1)  # behind the value's type
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"deep.gguf: .*4.295e\+09 layers are not supported"):
        GGUFCheckpoint(path)


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    write_whole(tmp_path / "whole")
    (tmp_path / "whole" / "more.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"more.safetensors: cannot be read: No such file"):
        read_whole(tmp_path / "whole")
