"""Decoders that transformers' own modules compute, with our attention plugged in; and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import BPE

from noria.engine.models.errors import ModelError
from noria.engine.models.foreign import ForeignDecoder, foreign_spec
from noria.engine.models.load import inspect, is_foreign, load
from noria.engine.models.precision import Precision
from noria.engine.models.source import resolve
from noria.engine.parallel import Parallel
from noria.kernels.choice import Sizes, choose
from tests.engine.models.families import SIZES
from tests.engine.models.ragged_steps import BLOCK_SIZE
from tests.engine.models.test_families import check

SERVED: dict[str, Callable[[], Any]] = {
    "cohere": lambda: hf.CohereConfig(**SIZES, logit_scale=0.3),
    "starcoder2": lambda: hf.Starcoder2Config(**SIZES, sliding_window=20),
    "olmo3": lambda: hf.Olmo3Config(
        **SIZES, sliding_window=20, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=300, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
    ),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bloom": (lambda: hf.BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4), "attention interface"),
    "mamba": (lambda: hf.MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2), "attention interface"),
    "gpt-oss": (
        lambda: hf.GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
        "s_aux is not supported",
    ),
}


def save(folder: Path, config: Any) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    Tokenizer(BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize("name", SERVED)
def test_a_foreign_decoder_computes_what_it_does_in_transformers(name: str, tmp_path: Path) -> None:
    reference = save(tmp_path, SERVED[name]())
    spec = inspect(resolve(str(tmp_path)))
    assert spec.computed == "foreign" and spec.num_parameters == sum(p.numel() for p in reference.parameters())
    kernels = "torch" if name == "opt" else "native"
    ops = choose(kernels, Sizes(spec.hidden_size, spec.head_dim, spec.ffn_step, BLOCK_SIZE), threads=1)
    loaded = load(resolve(str(tmp_path)), ops)
    assert isinstance(loaded.model, ForeignDecoder) and loaded.fingerprint.startswith("fp_")
    check(loaded.model, reference, [3, 40], chunk=25)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_attention_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    save(tmp_path, make())
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    with pytest.raises(ModelError, match=f"architecture '{architecture}' is not supported.*{reason}"):
        spec = foreign_spec(tmp_path)
        ForeignDecoder(tmp_path, spec, choose("torch", Sizes(64, 16, 96, BLOCK_SIZE), threads=1))


def test_layers_that_see_otherwise_than_the_module_says_are_found_at_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module whose mask does something of its own, of which attention is not told."""
    save(tmp_path, SERVED["cohere"]())
    ops = choose("torch", Sizes(64, 16, 96, BLOCK_SIZE), threads=1)
    attention = hf.models.cohere.modeling_cohere.CohereAttention
    own = attention.forward

    def biased(self: Any, hidden_states: Any, *arguments: Any, **given: Any) -> Any:
        return own(self, hidden_states + hidden_states.mean(dim=1, keepdim=True), *arguments, **given)

    monkeypatch.setattr(attention, "forward", biased)
    with pytest.raises(ModelError, match="its layers need more than attention over their own keys"):
        ForeignDecoder(tmp_path, foreign_spec(tmp_path), ops)


def test_settings_of_our_own_layers_are_refused(tmp_path: Path) -> None:
    save(tmp_path, SERVED["opt"]())
    source = resolve(str(tmp_path))
    ops = choose("native", Sizes(64, 16, 96, BLOCK_SIZE), threads=1)
    assert is_foreign(source)
    for given in ({"precision": Precision(quantize="int8")}, {"parallel": Parallel(0, 2, 1)}):
        with pytest.raises(ModelError, match="for models that we compute ourselves"):
            load(source, ops, **given)  # type: ignore[arg-type]
