"""A GGUF file's metadata as a ModelSpec, by architecture.

Knows llama.cpp's keys and what it takes for granted of each architecture (llama-model.cpp); reads no weights.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.spec import ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, layer_count

PAIRED = ("llama", "smollm3", "granite")
"""Whose queries and keys are stored with rotary pairs as neighbours. "llama" covers Llama 2 and 3, SmolLM2, Mistral and
Mixtral."""

ARCHITECTURES = (
    *PAIRED,
    *("qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3"),
    *("phi3", "olmo2", "olmoe", "stablelm", "gptneox", "gpt2"),
)
_LAYER_NORM = ("stablelm", "gptneox", "gpt2")
_HEAD_NORM = {"qwen3": "head", "qwen3moe": "head", "gemma3": "head", "olmo2": "width", "olmoe": "width"}
_NOT_READ = ("attn_q_norm", "attn_k_norm", "attn_post_norm", "post_attention_norm", "attn_sinks")
_GEMMA = ("gemma", "gemma2", "gemma3")
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the size whose scores are scaled by the share of a head in the width, not by the head's own width."""


class Metadata:
    """The keys of one architecture. ModelError names the file where one is missing or of no kind that is expected."""

    def __init__(self, file: GGUFFile) -> None:
        self.label = str(file.path)
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture", "(none)"))
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{self.label}: architecture {self.architecture!r} is not supported (GGUF: {', '.join(ARCHITECTURES)})"
            )

    def value(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.label}: metadata {self.architecture}.{key} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if isinstance(value, np.ndarray | list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.label}: {self.architecture}.{key} differs between layers: not supported")
            value = value[0]
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        return float(self.value(key, default))

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.label}: {what}")


def read_spec(file: GGUFFile) -> ModelSpec:
    """The model's shape. ModelError, naming the file, for what is not computed here or is broken."""
    meta = Metadata(file)
    kind = meta.architecture
    if not meta.has("token_embd.weight"):
        raise meta.refuse("tensor token_embd.weight is missing (a shard of a split file?)")
    vocab_size, hidden_size = file.tensors["token_embd.weight"].shape
    num_heads = meta.integer("attention.head_count")
    fused = meta.has("blk.0.attn_qkv.weight")
    spec: dict[str, Any] = {
        "architecture": kind,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": meta.integer("attention.head_count_kv", num_heads),
        "head_dim": meta.integer("attention.key_length", hidden_size // num_heads),
        "ffn_size": meta.integer("expert_feed_forward_length" if kind == "qwen3moe" else "feed_forward_length"),
        "norm_eps": meta.number(f"attention.layer_norm_{'' if kind in _LAYER_NORM else 'rms_'}epsilon"),
        "max_len": meta.integer("context_length"),
        "tied": not meta.has("output.weight"),
        "eos_token_ids": eos_token_ids(file),
        "qkv_bias": meta.has(f"blk.0.{'attn_qkv' if fused else 'attn_q'}.bias"),
        "output_bias": meta.has("blk.0.attn_output.bias"),
        "ffn_bias": meta.has("blk.0.ffn_up.bias"),
        "head_norm": _HEAD_NORM.get(kind, "none"),
        "attention_scale": meta.number("attention.scale", 0.0),
    }
    _refuse_variants(meta, spec)
    spec |= _forms(meta, spec) | _experts(meta, spec)
    return ModelSpec(**spec, layers=_layers(meta, spec))


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of turn, of message
    found = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    # Files that do not name their end-of-turn token still have it; without it a chat would not end.
    ends = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
    spelled = [tokens.index(token) for token in ends if token in tokens]
    return tuple(sorted({int(token) for token in (*found, *spelled) if token is not None}))


def _refuse_variants(meta: Metadata, spec: dict[str, Any]) -> None:
    if meta.integer("attention.value_length", spec["head_dim"]) != spec["head_dim"]:
        raise meta.refuse("keys and values of different sizes are not supported")
    read = {"head": _NOT_READ[:2], "width": _NOT_READ[:2]}.get(spec["head_norm"], ())
    if meta.architecture in ("gemma2", "gemma3", "olmo2"):
        read = (*read, "post_attention_norm")
    for name in _NOT_READ:
        if name not in read and meta.has(f"blk.0.{name}.weight"):
            raise meta.refuse(f"{meta.architecture} with {name} tensors is not supported")


def _forms(meta: Metadata, spec: dict[str, Any]) -> dict[str, Any]:
    """How the layers of the architecture are built."""
    kind, hidden = meta.architecture, spec["hidden_size"]
    if kind in _GEMMA:
        forms = {"activation": "gelu_tanh", "embedding_scale": hidden**0.5}
        if kind != "gemma":
            forms["residual"] = "sandwich"
        if meta.integer("block_count") == _LARGEST_GEMMA.get(kind):
            forms["attention_scale"] = (hidden / spec["num_heads"]) ** -0.5
        if kind == "gemma2":
            forms["attention_softcap"] = meta.number("attn_logit_softcapping", 50.0)
            forms["logit_softcap"] = meta.number("final_logit_softcapping", 30.0)
        return forms
    if kind == "granite":
        return {
            "embedding_scale": meta.number("embedding_scale", 1.0),
            "residual_scale": meta.number("residual_scale", 1.0),
            "logit_scale": 1.0 / meta.number("logit_scale", 1.0),
        }
    if kind == "olmo2":
        return {"residual": "post"}
    if kind not in _LAYER_NORM:
        return {}
    forms = {"norm": "layer", "norm_bias": True}
    if kind == "stablelm":
        shared = not meta.has("blk.0.ffn_norm.weight")
        return forms | ({"residual": "parallel", "ffn_norm": False} if shared else {})
    forms |= {"gated": False, "activation": "gelu" if kind == "gptneox" else "gelu_tanh"}
    if kind == "gptneox":
        return forms | ({"residual": "parallel"} if meta.value("use_parallel_residual", True) else {})
    return forms | {"num_positions": meta.file.tensors["position_embd.weight"].shape[0]}


def _experts(meta: Metadata, spec: dict[str, Any]) -> dict[str, Any]:
    num, kind = meta.integer("expert_count", 0), meta.architecture
    if not num:
        return {}
    if kind not in ("llama", "qwen3moe", "olmoe"):
        raise meta.refuse(f"{kind} as a mixture of experts is not supported")
    size = meta.integer("expert_feed_forward_length", spec["ffn_size"])
    return {"experts": ExpertsSpec(num, meta.integer("expert_used_count"), size, kind != "olmoe")}


def _layers(meta: Metadata, spec: dict[str, Any]) -> tuple[LayerSpec, ...]:
    kind, sparse = meta.architecture, "experts" in spec
    window = meta.integer("attention.sliding_window", 0)
    window = window if window < spec["max_len"] else 0
    rope = None if kind == "gpt2" else _rope(meta, spec["head_dim"])
    local = rope
    if kind == "gemma3":
        local = RopeSpec(meta.number("rope.freq_base_swa", 10000.0))
    period = {"gemma2": 2, "gemma3": 6}.get(kind)

    def layer(index: int) -> LayerSpec:
        if kind == "smollm3" and (index + 1) % 4 == 0:
            return LayerSpec(None, window)
        if period and (index + 1) % period == 0:
            return LayerSpec(rope, 0)
        return LayerSpec(local, window, sparse)

    return tuple(layer(index) for index in range(layer_count(meta.integer("block_count"))))


def _rope(meta: Metadata, head_dim: int) -> RopeSpec:
    dim = meta.integer("rope.dimension_count", head_dim)
    if dim != head_dim and (meta.architecture in PAIRED or dim % 2 or not 0 < dim < head_dim):
        raise meta.refuse(f"rotary embedding of a part of the head ({dim} of {head_dim}) is not supported")
    base = meta.number("rope.freq_base", 10000.0)
    known: dict[str, Any] = {"base": base, "dim": 0 if dim == head_dim else dim}
    original = meta.integer("rope.scaling.original_context_length", meta.integer("context_length"))
    if meta.has("rope_freqs.weight"):  # Llama 3.1 and later
        return RopeSpec(**known, kind="factors", factors=_factors(meta, "rope_freqs.weight", dim))
    if meta.has("rope_factors_long.weight"):
        long, short = (_factors(meta, f"rope_factors_{name}.weight", dim) for name in ("long", "short"))
        known |= {"original_max_len": original, "attention_factor": meta.number("rope.scaling.attn_factor", 1.0)}
        return RopeSpec(**known, kind="longrope", factors=long, short_factors=short)
    linear = meta.number("rope.scale_linear", 1.0)  # the key of older files
    kind = str(meta.value("rope.scaling.type", "linear" if linear != 1.0 else "none"))
    if kind == "none":
        return RopeSpec(**known)
    factor = meta.number("rope.scaling.factor", linear)
    if kind == "linear":
        return RopeSpec(**known, kind="linear", factor=factor)
    if kind == "yarn":
        attention = (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0) * meta.number("rope.scaling.attn_factor", 1.0)
        return RopeSpec(**known, kind="yarn", factor=factor, original_max_len=original, attention_factor=attention)
    raise meta.refuse(f"rope scaling {kind!r} is not supported")


def _factors(meta: Metadata, name: str, dim: int) -> tuple[float, ...]:
    if not meta.has(name):
        raise meta.refuse(f"tensor {name} is missing")
    factors = tuple(meta.file.dequantize(name).tolist())
    if len(factors) != dim // 2:
        raise meta.refuse(f"{name} has {len(factors)} values, not {dim // 2}")
    return factors
