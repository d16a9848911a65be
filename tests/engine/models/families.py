"""Tiny random models of every family that we compute ourselves, as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = SIZES | {"head_dim": 24, "sliding_window": 20, "query_pre_attn_scalar": 24}
NEOX = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **settings}}


def longrope(dim: int) -> dict[str, Any]:
    short, long = [1.0 + 0.1 * i for i in range(dim // 2)], [1.5 + 0.7 * i for i in range(dim // 2)]
    settings = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    return rope(**settings, original_max_position_embeddings=64) | {"original_max_position_embeddings": 64}


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama-tied-head-dim": lambda: hf.LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama-biases": lambda: hf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3-rope": lambda: hf.LlamaConfig(**SIZES, **rope(**LLAMA3, original_max_position_embeddings=64)),
    "linear-rope": lambda: hf.LlamaConfig(**SIZES, **rope(rope_type="linear", factor=4.0)),
    "yarn-rope": lambda: hf.LlamaConfig(**SIZES, **rope(**YARN)),
    "dynamic-rope": lambda: hf.LlamaConfig(
        **SIZES | {"max_position_embeddings": 64}, **rope(rope_type="dynamic", factor=3.0)
    ),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: hf.MistralConfig(**SIZES, sliding_window=20),
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "qwen2-window": lambda: hf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=32),
    "gemma": lambda: hf.GemmaConfig(**SIZES, head_dim=24),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    "gemma3": lambda: hf.Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 7}),
    "gemma3-scaled": lambda: hf.Gemma3TextConfig(
        **GEMMA | {"num_hidden_layers": 2},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": lambda: hf.Phi3Config(**SIZES, original_max_position_embeddings=512),
    "phi3-window": lambda: hf.Phi3Config(**SIZES, original_max_position_embeddings=512, sliding_window=33),
    "phi4-mini": lambda: hf.Phi3Config(
        **SIZES | longrope(8),
        partial_rotary_factor=0.5,
        tie_word_embeddings=True,
    ),
    "olmo2": lambda: hf.Olmo2Config(**SIZES),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES | {"num_hidden_layers": 5}),
    "granite": lambda: hf.GraniteConfig(
        **SIZES, attention_multiplier=0.2, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0
    ),
    "stablelm": lambda: hf.StableLmConfig(**SIZES, use_qkv_bias=True),
    "stablelm-parallel": lambda: hf.StableLmConfig(**SIZES, use_parallel_residual=True),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**NEOX),
    "gpt-neox-sequential": lambda: hf.GPTNeoXConfig(**NEOX, use_parallel_residual=False, rotary_pct=1.0),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=300, n_embd=64, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3-moe-all": lambda: hf.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "olmoe": lambda: hf.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
}


def tiny_model(name: str, *, layers: int = 0) -> Any:
    """The family's model, of its first `layers` where that is not 0; what starts as zeros or ones is random, so that a
    swap would be seen."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    if layers:
        config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    config._attn_implementation = "eager"  # transformers leaves soft caps out of others
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
