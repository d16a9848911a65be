"""The shape of a decoder-only model, as integers and flags: what the decoder and the memory arithmetic need.

Knows no file format: readers of GGUF and of config.json fill it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple


class Ends(NamedTuple):
    """Which ends of the stack a pipeline stage has beside its layers: the embedding, and final norm and output head."""

    first: bool = True
    last: bool = True


BOTH_ENDS = Ends()

LARGEST = 2**31 - 1
"""Of any size: beyond it no file is meant."""

MAX_LAYERS = 4096
MAX_EXPERTS = 2**17
"""In all layers together."""


def layer_count(number: int) -> int:
    """The number, if a model can have so many layers: asked before there is something for each. Else ValueError."""
    if not 0 < number <= MAX_LAYERS:
        raise ValueError(f"{number:.4g} layers are not supported (1 to {MAX_LAYERS})")
    return number


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: inverse frequencies base ** (-2i / dim), perhaps scaled.

    `linear` divides all by `factor`. `llama3` divides the low frequencies by `factor`, keeps the high ones and blends
    between, by wave length against `original_max_len` (Llama 3.1); `yarn` likewise, by turns within `original_max_len`
    (Peng et al. 2023). `factors` divides each by a number of its own. Two kinds depend on the length that is served and
    become one of these by `for_length`: `dynamic` raises the base, `longrope` takes `factors` beyond
    `original_max_len` and `short_factors` up to it.
    """

    base: float
    kind: Literal["default", "linear", "llama3", "yarn", "factors", "dynamic", "longrope"] = "default"
    dim: int = 0  # so many channels of a head turn, the first ones; 0: all
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_steps: bool = True  # of yarn: the range between the two betas is rounded to whole pairs
    factors: tuple[float, ...] = ()  # dim / 2 numbers
    short_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0  # on cosines and sines

    def for_length(self, length: int, head_dim: int) -> RopeSpec:
        """What holds for every position where `length` tokens are served at most."""
        if self.kind == "longrope":
            is_long = length > self.original_max_len
            return replace(self, kind="factors", factors=self.factors if is_long else self.short_factors)
        if self.kind == "dynamic":
            dim, stretch = self.dim or head_dim, max(1.0, length / self.original_max_len)
            grown = (self.factor * stretch - (self.factor - 1.0)) ** (dim / (dim - 2))
            return replace(self, kind="default", base=self.base * grown)
        return self


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: RopeSpec | None  # None: attention here sees no positions
    window: int = 0  # attention sees the last so many tokens; 0: all
    is_sparse: bool = False  # its feed-forward network is a mixture of experts


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: each token goes to the `per_token` of them that its router likes best."""

    num: int
    per_token: int
    ffn_size: int
    is_normalised: bool  # the chosen ones' weights are made to sum to 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. Lengths are tokens; `vocab_size` is the number of rows of the output head."""

    architecture: str  # as its file calls it
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    max_len: int
    layers: tuple[LayerSpec, ...]
    tied: bool  # the output head is the embedding
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    ffn_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    residual: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    """Where norms stand: before attention and feed-forward, behind them (OLMo 2), on both sides (Gemma), or before
    both at once, which then read the same x (GPT-NeoX)."""
    ffn_norm: bool = True  # False: where both read the same x, they read the same norm of it too
    head_norm: Literal["none", "head", "width"] = "none"  # of queries and keys: each head, or all heads as one
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    experts: ExpertsSpec | None = None
    num_positions: int = 0  # rows of a table of learned positions
    attention_scale: float = 0.0  # of the scores; 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # scores s become cap * tanh(s / cap)
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    foreign_parameters: int = 0  # of a model that transformers' own module computes; 0: ours

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no model has."""
        for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "max_len"):
            least = 0 if name == "ffn_size" and self.foreign_parameters else 1  # that is the module's own affair
            if not least <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name} = {getattr(self, name):.4g} is not supported")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} of keys and values")
        if not 0.0 <= self.norm_eps < 1.0:
            raise ValueError(f"an epsilon of {self.norm_eps} in norms is not supported")
        layer_count(len(self.layers))
        if self.experts is not None:
            self._check_experts(self.experts)

    def _check_experts(self, experts: ExpertsSpec) -> None:
        if not 0 < experts.per_token <= experts.num:
            raise ValueError(f"{experts.per_token:.4g} of {experts.num:.4g} experts for a token")
        if experts.num * len(self.layers) > MAX_EXPERTS or not 0 < experts.ffn_size <= LARGEST:
            raise ValueError(f"{experts.num:.4g} experts of size {experts.ffn_size:.4g} are not supported")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def score_scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    @property
    def is_capped(self) -> bool:
        """Whether attention has windows or soft caps."""
        return bool(self.attention_softcap) or any(layer.window for layer in self.layers)

    @property
    def keeps_bits(self) -> bool:
        """Whether what torch computes beside a backend's operations rounds a token alike wherever in a batch it lies:
        its vectorised gelu and tanh do not."""
        return not self.foreign_parameters and self.gated and self.activation != "gelu" and not self.logit_softcap

    @property
    def beyond_triton(self) -> str:
        """What the Triton kernels lack for this model."""
        return "part in models that transformers computes" if self.foreign_parameters else ""

    @property
    def ffn_step(self) -> int:
        """What the width of every feed-forward network is a multiple of."""
        return math.gcd(self.ffn_size, self.experts.ffn_size if self.experts else 0)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that turn, in the layers where any do."""
        return next((layer.rope.dim for layer in self.layers if layer.rope and layer.rope.dim), 0) or self.head_dim

    @property
    def computed(self) -> Literal["fused", "composed", "foreign"]:
        """By what: the backends' fused layers, our layers an operation at a time, or transformers' module."""
        return "foreign" if self.foreign_parameters else "fused" if self.is_llama_shaped else "composed"

    @property
    def is_llama_shaped(self) -> bool:
        """Whether the backends' fused layers compute it: Llama's layer, and every layer alike."""
        plain = self.norm == "rms" and self.residual == "pre" and self.head_norm == "none" and self.residual_scale == 1
        swiglu = self.gated and self.activation == "silu" and self.experts is None
        alike = len(set(self.layers)) == 1 and not self.is_capped
        return plain and swiglu and alike

    def for_length(self, length: int) -> ModelSpec:
        """The model where `length` tokens are served at most: rotary positions may depend on it."""

        def settled(layer: LayerSpec) -> LayerSpec:
            return layer if layer.rope is None else replace(layer, rope=layer.rope.for_length(length, self.head_dim))

        return replace(self, layers=tuple(map(settled, self.layers)))

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices and norms, the head counted once when tied."""
        return self.foreign_parameters or sum(math.prod(shape) for shape in tensor_shapes(self).values())

    @property
    def weight_bytes(self) -> int:
        """Memory that the loaded weights take in float32, the embedding table and the packed head both counted."""
        head = self.vocab_size * self.hidden_size if self.tied else 0
        return 4 * (self.num_parameters + head)


def tensor_shapes(spec: ModelSpec, ends: Ends = BOTH_ENDS) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, or of a stage of it, and its shape, in the order in which they are read.

    The names are Hugging Face's for Llama, with names beside them for what Llama has not: `attention_output_norm` and
    `ffn_output_norm` stand behind attention and feed-forward (`post_attention_layernorm` is the norm before the
    latter, as there), `mlp.router` and `mlp.experts.N` are a mixture of experts, `model.embed_positions` learned ones.
    """
    hidden, vocab = spec.hidden_size, spec.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    if ends.first or (ends.last and spec.tied):
        shapes["model.embed_tokens.weight"] = (vocab, hidden)
    if ends.first and spec.num_positions:
        shapes["model.embed_positions.weight"] = (spec.num_positions, hidden)
    for index, layer in enumerate(spec.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(spec, layer).items()}
    if ends.last:
        shapes |= _norm_shapes(spec, "model.norm") | ({} if spec.tied else {"lm_head.weight": (vocab, hidden)})
    return shapes


def _layer_shapes(spec: ModelSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    hidden, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.residual != "post":
        shapes |= _norm_shapes(spec, "input_layernorm")
        if spec.ffn_norm:
            shapes |= _norm_shapes(spec, "post_attention_layernorm")
    if spec.residual in ("post", "sandwich"):
        shapes |= _norm_shapes(spec, "attention_output_norm") | _norm_shapes(spec, "ffn_output_norm")
    if spec.head_norm != "none":
        widths = (spec.head_dim, spec.head_dim) if spec.head_norm == "head" else (queries, keys)
        shapes |= {"self_attn.q_norm.weight": widths[:1], "self_attn.k_norm.weight": widths[1:]}
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        shapes |= _linear_shapes(f"self_attn.{name}_proj", width, hidden, spec.qkv_bias)
    shapes |= _linear_shapes("self_attn.o_proj", hidden, queries, spec.output_bias)
    if not layer.is_sparse or spec.experts is None:
        return shapes | _ffn_shapes(spec, "mlp", spec.ffn_size)
    shapes["mlp.router.weight"] = (spec.experts.num, hidden)
    for number in range(spec.experts.num):
        shapes |= _ffn_shapes(spec, f"mlp.experts.{number}", spec.experts.ffn_size)
    return shapes


def _ffn_shapes(spec: ModelSpec, prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("gate_proj", "up_proj") if spec.gated else ("up_proj",):
        shapes |= _linear_shapes(f"{prefix}.{name}", width, spec.hidden_size, spec.ffn_bias)
    return shapes | _linear_shapes(f"{prefix}.down_proj", spec.hidden_size, width, spec.ffn_bias)


def _linear_shapes(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


def _norm_shapes(spec: ModelSpec, name: str) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (spec.hidden_size,)}
    return weight | {f"{name}.bias": (spec.hidden_size,)} if spec.norm_bias else weight
