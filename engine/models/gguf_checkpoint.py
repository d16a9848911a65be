"""A GGUF file as a checkpoint: its metadata as a ModelSpec, its tensors under Hugging Face names and in that order.

Knows llama.cpp's names and its rope layout; the container is `gguf_file`, the tokenizer `gguf_tokenizer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_groups import read_groups
from noria.engine.models.spec import ModelSpec, RopeSpec
from noria.kernels.weights import Weight

ARCHITECTURES = ("llama", "qwen2")  # "llama" covers Llama 2 and 3, SmolLM2 and Mistral

_LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TABLES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class GGUFCheckpoint:
    """See `build.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self.file = GGUFFile(path)
        self._architecture = str(self.file.metadata.get("general.architecture", "(none)"))
        self._spec = self._read_spec()

    def spec(self) -> ModelSpec:
        return self._spec

    def num_bytes(self, name: str) -> int:
        place = self.file.tensors.get(_gguf_name(name))
        return place.nbytes if place else 0

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        values = self.file.dequantize(_gguf_name(name), rows, columns)
        return _half_rotation(values, self._spec.head_dim) if self._is_paired(name) else values

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        grouped = read_groups(self.file, _gguf_name(name), rows, columns)
        if grouped is None:
            return self.tensor(name, rows, columns)
        return grouped.rows(lambda r: _half_rotation(r, self._spec.head_dim)) if self._is_paired(name) else grouped

    def _is_paired(self, name: str) -> bool:
        """Whether it is a projection whose rows are in llama.cpp's rotary order."""
        return self._architecture == "llama" and (".q_proj." in name or ".k_proj." in name)

    def _read_spec(self) -> ModelSpec:
        tensors = self.file.tensors
        if self._architecture not in ARCHITECTURES:
            raise ModelError(
                f"{self.label}: architecture {self._architecture!r} is not supported (GGUF: {', '.join(ARCHITECTURES)})"
            )
        self._refuse_variants()
        if "token_embd.weight" not in tensors:
            raise ModelError(f"{self.label}: tensor token_embd.weight is missing (a shard of a split file?)")
        vocab_size, hidden_size = tensors["token_embd.weight"].shape
        num_heads = self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", hidden_size // num_heads)
        if self._integer("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{self.label}: rotary embedding of a part of the head is not supported")
        return ModelSpec(
            architecture=self._architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=self._integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=self._integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            ffn_size=self._integer("feed_forward_length"),
            norm_eps=float(self._value("attention.layer_norm_rms_epsilon")),
            rope=self._read_rope(head_dim),
            max_len=self._integer("context_length"),
            tied="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            ffn_bias="blk.0.ffn_gate.bias" in tensors,
            eos_token_ids=self._eos_token_ids(),
        )

    def _refuse_variants(self) -> None:
        if self._integer("expert_count", 0):
            raise ModelError(f"{self.label}: mixture-of-experts models are not supported")
        if self._integer("attention.sliding_window", 0):
            raise ModelError(f"{self.label}: sliding-window attention is not supported")
        for name in ("attn_q_norm", "attn_k_norm", "attn_post_norm", "attn_qkv"):
            if f"blk.0.{name}.weight" in self.file.tensors:
                raise ModelError(f"{self.label}: {self._architecture} with {name} tensors is not supported")

    def _read_rope(self, head_dim: int) -> RopeSpec:
        base = float(self._value("rope.freq_base", 10000.0))
        if "rope_freqs.weight" in self.file.tensors:  # Llama 3.1 and later
            factors = tuple(self.file.dequantize("rope_freqs.weight").tolist())
            if len(factors) != head_dim // 2:
                raise ModelError(f"{self.label}: rope_freqs.weight has {len(factors)} values, not {head_dim // 2}")
            return RopeSpec(base, "factors", factors=factors)
        linear = float(self._value("rope.scale_linear", 1.0))  # the key of older files
        kind = str(self._value("rope.scaling.type", "linear" if linear != 1.0 else "none"))
        if kind == "linear":
            return RopeSpec(base, "linear", factor=float(self._value("rope.scaling.factor", linear)))
        if kind != "none":
            raise ModelError(f"{self.label}: rope scaling {kind!r} is not supported")
        return RopeSpec(base)

    def _eos_token_ids(self) -> tuple[int, ...]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of turn, of message
        found = [self.file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        tokens = self.file.metadata.get("tokenizer.ggml.tokens", [])
        # Files that do not name their end-of-turn token still have it; without it a chat would not end.
        spelled = [tokens.index(token) for token in ("<|eot_id|>", "<|im_end|>") if token in tokens]
        return tuple(sorted({int(token) for token in (*found, *spelled) if token is not None}))

    def _value(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.label}: metadata {self._architecture}.{key} is missing")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, np.ndarray | list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.label}: {self._architecture}.{key} differs between layers: not supported")
            value = value[0]
        return int(value)


def _gguf_name(name: str) -> str:
    if name in _TABLES:
        return _TABLES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_PARTS[part]}.{kind}"


def _half_rotation(values: Tensor, head_dim: int) -> Tensor:
    """Undo llama.cpp's order of a head's channels, where rotary pairs are neighbours: (0, 1), (2, 3), ..."""
    return values.view(-1, head_dim // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
