"""LoRA adapters against PEFT on the same weights, beside each other and beside the model alone; and those refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from noria.engine.models.decoder import Decoder
from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.lora import Adapter, describe, load_adapter
from noria.engine.models.safetensors_checkpoint import SafetensorsCheckpoint
from noria.kernels.layout import RaggedLayout
from noria.kernels.low_rank import AdaptedRows
from tests.engine.models.adapters import make_adapter
from tests.engine.models.families import tiny_model
from tests.engine.models.gguf_writing import ARCHITECTURES, write_gguf
from tests.engine.models.ragged_steps import BLOCK_SIZE, decoder, expected_logits, pools

TOLERANCE = 1e-4
ATTENTION = ["q_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(model: Decoder, rows: list[tuple[list[int], Adapter | None]]) -> list[Tensor]:
    """Of every token of each prompt, all computed in one step, each under its adapter."""
    kv = pools(model, len(rows))
    lengths = [len(ids) for ids, _ in rows]
    blocks = [[2 * place, 2 * place + 1] for place in range(len(rows))]
    layout = RaggedLayout.build([(0, n, own) for n, own in zip(lengths, blocks, strict=True)], 0, BLOCK_SIZE)
    adapted, first = [], 0
    for ids, adapter in rows:
        if adapter is not None:
            adapted.append(AdaptedRows(adapter.pairs, adapter.packed, first, first + len(ids)))
        first += len(ids)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.tensor([token for prompt, _ in rows for token in prompt])
    hidden = model.hidden_states(ids, positions, kv, layout, None, adapted)
    return list(model.logits(hidden).split(lengths))


def close(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).abs().max()) < TOLERANCE * float(wanted.abs().max())


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama-biases", {}),
        ("phi3", {}),  # its queries, keys and values are one linear
        ("gpt2", {"use_rslora": True}),
        ("gpt-neox", {}),  # its heads' channels are kept in another order
        ("gemma2", {"r": 3, "rank_pattern": {"down_proj": 7}, "alpha_pattern": {r"layers\.1\..*q_proj": 2.0}}),
        ("granite", {"target_modules": r".*\.(k_proj|up_proj)", "layers_to_transform": None}),
        ("qwen3-moe-all", {"target_modules": ATTENTION}),
        ("stablelm", {"target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [0, 2]}),
    ],
)
def test_an_adapter_computes_what_peft_does(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "base")
    reference = make_adapter(tiny_model(family), tmp_path / "adapter", **config)
    checkpoint, ids = SafetensorsCheckpoint(tmp_path / "base"), prompt(1, 21)
    wanted = expected_logits(reference, ids)
    for kernels in ("native", "torch"):
        model = decoder(checkpoint, kernels, 512)
        adapter = load_adapter(tmp_path / "adapter", model.spec, model.ops)
        with_it, without = logits(model, [(ids, adapter)])[0], logits(model, [(ids, None)])[0]
        assert close(with_it, wanted) and not close(without, wanted)


def test_an_adapter_fits_the_gguf_file_of_its_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("phi3"), ARCHITECTURES["phi3"])
    reference = make_adapter(tiny_model("phi3"), tmp_path / "adapter")
    model = decoder(GGUFCheckpoint(tmp_path / "tiny.gguf"), "native", 512)
    adapter = load_adapter(tmp_path / "adapter", model.spec, model.ops)
    assert close(logits(model, [(prompt(1, 9), adapter)])[0], expected_logits(reference, prompt(1, 9)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_company_changes_no_bit(family: str, tmp_path: Path) -> None:
    """Of two adapters and of the model alone in one batch, in fused layers and composed; and the model alone has the
    bits that it has without any."""
    tiny_model(family).save_pretrained(tmp_path / "base")
    model = decoder(SafetensorsCheckpoint(tmp_path / "base"), "native", 512)
    adapters: list[Adapter | None] = [None]
    for number, targets in enumerate(("all-linear", ATTENTION)):
        make_adapter(tiny_model(family), tmp_path / str(number), seed=number, r=5, target_modules=targets)
        adapters.append(load_adapter(tmp_path / str(number), model.spec, model.ops))
    rows = [(prompt(place, length), adapters[place % 3]) for place, length in enumerate((17, 5, 30, 1, 9, 12))]
    alone = [logits(model, [row])[0] for row in rows]
    together = logits(model, rows)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    backwards = logits(model, rows[::-1])[::-1]
    assert all(torch.equal(one, other) for one, other in zip(alone, backwards, strict=True))
    composed = [(ids, adapter and replace(adapter, packed=None)) for ids, adapter in rows]
    assert all(torch.equal(one, other) for one, other in zip(alone, logits(model, composed), strict=True))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    """An adapter of attention, and its model."""
    folder = tmp_path_factory.mktemp("lora")
    tiny_model("llama").save_pretrained(folder / "base")
    make_adapter(tiny_model("llama"), folder / "adapter", target_modules=ATTENTION)
    return folder / "adapter", decoder(SafetensorsCheckpoint(folder / "base"), "native", 64)


def changed(good: Path, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor | None]) -> Path:
    """The adapter with other settings and tensors; None takes a tensor away."""
    folder.mkdir()
    found = json.loads((good / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**found, **config}))
    kept = load_file(good / "adapter_model.safetensors") | tensors
    save_file({name: value for name, value in kept.items() if value is not None}, folder / "adapter_model.safetensors")
    return folder


AT = "base_model.model.model.layers.1.self_attn.q_proj"
MODEL = "base_model.model."


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"use_dora": True}, {}, "use_dora: DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, {}, "trained tokens"),
        ({"bias": "all"}, {}, "trained biases"),
        ({"peft_type": "IA3"}, {}, "only LORA"),
        ({"init_lora_weights": "pissa"}, {}, "changes the base model"),
        ({"r": 0}, {}, "at least 1"),
        ({"r": "four"}, {}, "Expected `int`"),
        ({"lora_alpha": float("nan")}, {}, "finite"),
        ({"lora_alpha": 1e300}, {}, "beyond float32"),
        ({"target_modules": "("}, {}, "no regular expression"),
        ({"target_modules": r"([a-z.]|\w|.)*\d\d"}, {}, "too long to match"),
        ({"r": 8}, {}, "has shape [4, 64], this model needs [8, 64]"),
        ({"target_modules": ["q_proj", "v_proj"]}, {}, "o_proj.lora_A.weight: target_modules do not name it"),
        ({"target_modules": [*ATTENTION, "k_proj"]}, {}, "k_proj.lora_A.weight is missing"),
        ({}, {f"{AT}.lora_B.weight": None}, "q_proj.lora_B.weight is missing"),
        ({"base_model_name_or_path": "big"}, {f"{AT}.lora_A.weight": torch.ones(4, 96)}, "was trained on big"),
        ({}, {f"{AT}.lora_A.weight": torch.full((4, 64), torch.nan)}, "NaN"),
        ({}, {f"{AT}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}, "int8"),
        ({}, {f"{MODEL}model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(4, 64)}, "the model has 3"),
        ({}, {f"{MODEL}model.embed_tokens.lora_embedding_A": torch.ones(4, 300)}, "embeddings are not supported"),
        ({}, {f"{MODEL}lm_head.lora_A.weight": torch.ones(4, 64)}, "output head"),
        ({}, {f"{AT}.lora_magnitude_vector": torch.ones(64)}, "DoRA"),
        ({}, {f"{MODEL}model.layers.1.mlp.experts.0.up_proj.lora_A.weight": torch.ones(4, 64)}, "experts"),
        ({}, {f"{MODEL}model.layers.1.mlp.fc.lora_A.weight": torch.ones(4, 64)}, "no such linear"),
    ],
)
def test_a_bad_adapter_is_refused_by_name(
    config: dict[str, Any], tensors: dict[str, Tensor | None], message: str, good: tuple[Path, Decoder], tmp_path: Path
) -> None:
    adapter, model = good
    folder = changed(adapter, tmp_path / "bad", config, tensors)
    with pytest.raises(ModelError) as refused:
        load_adapter(folder, model.spec, model.ops)
    assert message in str(refused.value) and str(folder) in str(refused.value)


def test_a_folder_that_lacks_a_file_or_has_a_broken_one_is_refused(good: tuple[Path, Decoder], tmp_path: Path) -> None:
    adapter, model = good

    def refusal() -> str:
        with pytest.raises(ModelError) as refused:
            load_adapter(tmp_path, model.spec, model.ops)
        return str(refused.value)

    assert "adapter_config.json" in refusal()
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    assert "adapter_model.safetensors: cannot be read" in refusal()
    (tmp_path / "adapter_model.bin").touch()
    assert "save it as safetensors" in refusal()
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes()[:-9])
    assert "broken or truncated" in refusal()
    save_file({}, tmp_path / "adapter_model.safetensors")
    assert "is missing" in refusal()
    for name in ("adapter_model.safetensors", "adapter_config.json"):  # to open a pipe would take for ever
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        assert f"{name}: cannot be read: not a regular file" in refusal()


def test_inspection_finds_numbers_that_are_none(good: tuple[Path, Decoder], tmp_path: Path) -> None:
    nan = changed(good[0], tmp_path / "nan", {}, {f"{AT}.lora_A.weight": torch.full((4, 64), torch.nan)})
    with pytest.raises(ModelError, match="NaN or infinity"):
        describe(nan)
    _, number, size = describe(good[0])
    assert number == len(load_file(good[0] / "adapter_model.safetensors")) and size > 0
