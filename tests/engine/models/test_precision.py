"""Weights rounded when they are read: what that changes, what it leaves alone, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from noria.engine.config import EngineConfig
from noria.engine.models.decoder import Decoder
from noria.engine.models.errors import ModelError
from noria.engine.models.load import build_decoder, load
from noria.engine.models.precision import Precision
from noria.engine.models.safetensors_checkpoint import SafetensorsCheckpoint
from noria.engine.models.source import resolve
from noria.engine.plan import plan
from noria.kernels.choice import Sizes, choose
from noria.kernels.layout import RaggedLayout

PRECISIONS = [Precision("fp16"), Precision("bf16"), Precision("auto", "int8"), Precision("auto", "q4")]
SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("precision"))


def decoder(folder: Path, precision: Precision) -> Decoder:
    ops = choose("native", Sizes(64, 32, 96, 16), 1)
    return build_decoder(SafetensorsCheckpoint(folder), ops, precision=precision)


def logits(model: Decoder) -> Tensor:
    spec, ids = model.spec, torch.arange(2, 22)
    kv = model.ops.new_kv_pools(spec.num_layers, 2, 16, spec.num_kv_heads, spec.head_dim, torch.float32)
    layout = RaggedLayout.build([(0, len(ids), [0, 1])], 0, 16)
    return model.forward(ids, torch.arange(len(ids)), kv, layout, torch.arange(len(ids)))


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: f"{p.dtype}-{p.quantize}")
def test_rounded_weights_compute_nearly_the_same(folder: Path, precision: Precision) -> None:
    expected, found = logits(decoder(folder, Precision())), logits(decoder(folder, precision))
    off = float((found - expected).norm() / expected.norm())
    bound = {"fp16": 2e-3, "bf16": 2e-2}.get(precision.dtype, 0.05 if precision.quantize == "int8" else 0.4)
    assert 0 < off < bound


def test_rounding_when_read_is_what_rounding_the_file_is(folder: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    saved = decoder(save(model, tmp_path), Precision())
    assert torch.equal(logits(decoder(folder, Precision("bf16"))), logits(saved))


def test_what_half_precision_cannot_hold_is_named(folder: Path, tmp_path: Path) -> None:
    huge = save(LlamaForCausalLM.from_pretrained(folder), tmp_path)
    tensors = load_file(huge / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(tensors, huge / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight: 1e\+06 is more than fp16 can hold"):
        decoder(huge, Precision("fp16"))
    decoder(huge, Precision("bf16"))


def test_integers_of_a_file_stay_and_to_quantise_nothing_else_is_refused() -> None:
    source, ops = resolve("smollm2-135m-instruct"), choose("native", Sizes(576, 64, 1536, 16), 1)
    plain, asked = load(source, ops), load(source, ops, precision=Precision("fp16"))
    hidden = torch.randn(3, 576)
    assert torch.equal(plain.model.logits(hidden), asked.model.logits(hidden))
    assert plain.fingerprint != asked.fingerprint
    with pytest.raises(ModelError, match="--quantize q4: its weights are integers already"):
        load(source, ops, precision=Precision("auto", "q4"))


@pytest.mark.parametrize("settings", [{"quantize": "q4"}, {"quantize": "int8"}, {"dtype": "fp16"}, {"dtype": "bf16"}])
def test_kernels_that_cannot_say_so(settings: dict[str, str]) -> None:
    (option, value), *_ = settings.items()
    with pytest.raises(ValueError, match=f"--{option} {value} needs the C kernels"):
        plan(EngineConfig(kernels="torch", **settings))  # type: ignore[arg-type]


def test_less_memory_is_planned_for_fewer_bits(folder: Path) -> None:
    spec = SafetensorsCheckpoint(folder).spec()
    stored = 4 * spec.num_parameters
    sizes = [
        p.weight_bytes(spec, stored) for p in (Precision("auto", "q4"), Precision("auto", "int8"), Precision("bf16"))
    ]
    assert sizes == sorted(sizes) and sizes[-1] * 2 == Precision("fp32").weight_bytes(spec, stored) == stored


def test_who_computes_the_same_bits_in_any_batch_says_so() -> None:
    assert plan(EngineConfig(kernels="native", deterministic=True)).deterministic
    assert not plan(EngineConfig(kernels="torch")).deterministic
    with pytest.raises(ValueError, match="--deterministic needs the C kernels"):
        plan(EngineConfig(kernels="torch", deterministic=True))
