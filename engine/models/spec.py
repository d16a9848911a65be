"""The shape of a decoder-only model, as integers and flags: what the decoder and the memory arithmetic need.

Knows no file format: readers of GGUF and of config.json fill it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: inverse frequencies base ** (-2i / head_dim), perhaps scaled.

    `linear` divides all by `factor`. `llama3` divides the low frequencies by `factor`, keeps the high ones and blends
    between, by wave length against `original_max_len` (Llama 3.1). `factors` divides each by a number of its own,
    which a GGUF file carries as a tensor.
    """

    base: float
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    factors: tuple[float, ...] = ()  # head_dim / 2 numbers, for kind "factors"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One Llama-family model. Lengths are tokens; `vocab_size` is the number of rows of the output head."""

    architecture: str  # as its file calls it
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope: RopeSpec
    max_len: int
    tied: bool  # the output head is the embedding
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    ffn_bias: bool
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices and norms, the head counted once when tied."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * layer + tables + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Memory that the loaded weights take in float32, the embedding table and the packed head both counted."""
        head = self.vocab_size * self.hidden_size if self.tied else 0
        return 4 * (self.num_parameters + head)
