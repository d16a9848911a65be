"""What `noria models` says of a model, from its headers alone."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from bench import tiny_model
from noria.engine.models.errors import ModelError
from noria.model_report import inspect_table, model_table
from tests.engine.models.adapters import make_adapter
from tests.engine.models.families import tiny_model as family


def printed(table: Table, capsys: pytest.CaptureFixture[str]) -> str:
    Console(width=300).print(table)
    return capsys.readouterr().out


def test_a_model_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_model.make(tmp_path / "tiny")
    shown = printed(inspect_table(str(folder), "1MiB"), capsys)
    assert "LlamaForCausalLM" in shown and "fused: all layers in one call" in shown and "2,048 tokens" in shown
    # Two layers of two KV heads of 16 channels, keys and values, two bytes each.
    assert "128 bytes fp8, 256 bytes fp16, 512 bytes fp32" in shown
    stored = 4 * (97 * 64 * 2 + 64 + 2 * (2 * 64 + 64 * 16 * 12 + 3 * 64 * 128))
    assert f"at most {(2**20 - stored) // 256:,} tokens of KV" in shown
    with pytest.raises(ValueError, match="is no size"):
        inspect_table(str(folder), "much")


def test_windows_and_experts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("gemma3", "6 layers see the last 20 tokens"), ("mixtral", "2 of 4 for a token")):
        family(name).save_pretrained(tmp_path / name)
        shown = printed(inspect_table(str(tmp_path / name), "1GiB"), capsys)
        assert words in shown and "composed: our layers" in shown
        assert ("without windows it were" in shown) == (name == "gemma3")


def test_windows_make_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many more requests fit as the blocks behind the windows leave room for."""
    family("mistral-window").save_pretrained(tmp_path)
    kept = ceil((20 + 512) / 16) + 1  # blocks of 3 layers: 2 heads of 16 channels, keys and values, 2 bytes each
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 4096'))
    shown = printed(inspect_table(str(tmp_path), "1GiB"), capsys)
    stored = sum(p.numel() for p in family("mistral-window").parameters()) * 4
    assert f"{(2**30 - stored) // (kept * 16 * 3 * 128):,} of 4,096 tokens" in shown


def test_the_demo_model_is_listed_with_how_it_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fused" in printed(model_table(), capsys)
    with pytest.raises(ModelError, match="no such file or folder"):
        inspect_table("/no/such/model", "")


def test_an_adapter_is_told_apart_from_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_adapter(family("llama"), tmp_path, r=4, rank_pattern={"o_proj": 2}, target_modules=["q_proj", "o_proj"])
    shown = printed(inspect_table(str(tmp_path), ""), capsys)
    assert "LoRA" in shown and "4, 2 for o_proj" in shown and "o_proj, q_proj" in shown and "12 matrices" in shown
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        inspect_table(str(tmp_path), "")
