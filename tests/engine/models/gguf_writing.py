"""Writes a transformers model as the GGUF file that llama.cpp's converter makes of it: names, orders, metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama",
    "llama-biases": "llama",
    "yarn-rope": "llama",
    "linear-rope": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi4-mini": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "stablelm": "stablelm",
    "stablelm-parallel": "stablelm",
    "gpt-neox": "gptneox",
    "gpt2": "gpt2",
    "mixtral": "llama",
    "qwen3-moe-all": "qwen3moe",
    "olmoe": "olmoe",
}
"""Names of `families.CONFIGS` -> the architecture that their files name."""


def write_gguf(path: Path, model: Any, architecture: str) -> None:
    """The model in float32, without a vocabulary."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    _metadata(writer, config, architecture)
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, values in _stacked(dict(model.named_parameters())).items():
        if tied and name in ("lm_head.weight", "embed_out.weight"):
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        data = _converted(name, values.detach().float(), config, architecture)
        writer.add_tensor(found, np.ascontiguousarray(data.numpy()))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon)
    if getattr(config, "sliding_window", None) and architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if hasattr(config, "use_parallel_residual"):
        writer.add_parallel_residual(config.use_parallel_residual)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture != "gpt2":
        _rope(writer, config, head_dim)


def _rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(stretch) / np.log(original))))


def _stacked(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as the converter stacks them: gate, up and down apart, [E, rows, columns] each."""
    found: dict[str, Tensor] = {}
    for name, values in parameters.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = values.chunk(2, dim=1)
            found |= {name.replace("gate_up", "gate") + ".weight": gate, name.replace("gate_up", "up") + ".weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = values
        else:
            found[name] = values
    return found


def _converted(name: str, values: Tensor, config: Any, architecture: str) -> Tensor:
    heads = config.num_attention_heads
    if architecture in ("llama", "smollm3", "granite") and (".q_proj." in name or ".k_proj." in name):
        # Rotary pairs as neighbours.
        count = heads if ".q_proj." in name else config.num_key_value_heads
        paired = values.view(count, 2, -1, *values.shape[1:]).transpose(1, 2)
        return paired.reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if architecture == "gptneox" and ".query_key_value." in name:
        return torch.cat(list(values.view(heads, 3, -1, *values.shape[1:]).unbind(1))).reshape(values.shape)
    if architecture == "gpt2" and name.endswith(".weight") and values.dim() == 2 and ".h." in name:
        return values.t()
    return values
