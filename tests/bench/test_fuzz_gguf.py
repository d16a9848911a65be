"""Some of the broken GGUF files of the bench, and the whole one that they are made of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bench.fuzz_gguf import faults, read_whole, write_small
from noria.engine.models.errors import ModelError
from noria.engine.wire.tokenizer import Tokenizer


def test_the_whole_file_is_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    write_small(tmp_path / "whole.gguf")
    tokenizer = Tokenizer.load(read_whole(tmp_path / "whole.gguf"))
    assert tokenizer.encode(" a")


def test_a_broken_file_is_a_model_or_one_clear_line(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    assert list(faults(tmp_path, 250, 7, outcomes)) == []
    assert outcomes["read"] > 5 and outcomes["refused"] > 150


def test_no_file_writes_to_a_terminal() -> None:
    assert str(ModelError("a.gguf: \x1b[2J\n'b'")) == "a.gguf: ?[2J?'b'"
    assert len(str(ModelError("x" * 10_000))) < 600
