"""Tensor names in the folders of families that do not use Llama's, and in which layout.

Knows names and shapes; opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

from noria.engine.models.places import Place
from noria.engine.models.spec import ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GEMMA = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "ffn_output_norm": "post_feedforward_layernorm",
}
_NEOX = {
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_NEOX_TABLES = {
    "model.embed_tokens.weight": "gpt_neox.embed_in.weight",
    "model.norm.weight": "gpt_neox.final_layer_norm.weight",
    "model.norm.bias": "gpt_neox.final_layer_norm.bias",
    "lm_head.weight": "embed_out.weight",
}
_GPT2 = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2_TABLES = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "model.embed_positions.weight": "transformer.wpe.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "model.norm.bias": "transformer.ln_f.bias",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def hf_place(spec: ModelSpec, name: str) -> Place:
    """Where the folder of the spec's architecture has the model's tensor."""
    place = _PLACES.get(spec.architecture)
    return Place(name) if place is None else place(spec, name)


def _split(name: str) -> tuple[str, str, str]:
    """Layer, part and kind; all empty for a tensor outside of the layers."""
    match = _LAYER.fullmatch(name)
    return (match[1], match[2], match[3]) if match else ("", "", "")


def _renamed(parts: dict[str, str]) -> Callable[[ModelSpec, str], Place]:
    def place(spec: ModelSpec, name: str) -> Place:
        layer, part, kind = _split(name)
        return Place(f"model.layers.{layer}.{parts.get(part, part)}.{kind}" if layer else name)

    return place


def _gemma(parts: dict[str, str]) -> Callable[[ModelSpec, str], Place]:
    """Gemma's norms hold what is over 1."""

    def place(spec: ModelSpec, name: str) -> Place:
        return Place(_renamed(parts)(spec, name).name, added=1.0 if "norm." in name else 0.0)

    return place


def _phi3(spec: ModelSpec, name: str) -> Place:
    layer, part, kind = _split(name)
    at = f"model.layers.{layer}."
    if part in _QKV:
        return Place(f"{at}self_attn.qkv_proj.{kind}", *_qkv_rows(spec, part))
    if part in ("mlp.gate_proj", "mlp.up_proj"):
        return Place(f"{at}mlp.gate_up_proj.{kind}", spec.ffn_size * (part == "mlp.up_proj"), spec.ffn_size)
    return Place(name)


def _qkv_rows(spec: ModelSpec, part: str) -> tuple[int, int]:
    """First row and number of rows of queries, keys or values that stand one below the other."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {_QKV[0]: (0, queries), _QKV[1]: (queries, keys), _QKV[2]: (queries + keys, keys)}[part]


def _gpt_neox(spec: ModelSpec, name: str) -> Place:
    layer, part, kind = _split(name)
    if not layer:
        return Place(_NEOX_TABLES[name])
    at = f"gpt_neox.layers.{layer}."
    if part not in _QKV:
        return Place(f"{at}{_NEOX.get(part, part)}.{kind}")
    which = _QKV.index(part)

    def of_each_head(values: Tensor) -> Tensor:
        """A head's queries, keys and values stand together."""
        heads = values.view(spec.num_heads, 3, spec.head_dim, *values.shape[1:])
        return heads[:, which].flatten(0, 1)

    return Place(f"{at}attention.query_key_value.{kind}", pick=of_each_head)


def _gpt2(spec: ModelSpec, name: str) -> Place:
    layer, part, kind = _split(name)
    if not layer:
        return Place(_GPT2_TABLES[name])
    at = f"transformer.h.{layer}."
    turned = kind == "weight"  # its linear layers are kept as [in, out]
    if part in _QKV:
        return Place(f"{at}attn.c_attn.{kind}", *_qkv_rows(spec, part), is_transposed=turned)
    return Place(f"{at}{_GPT2[part]}.{kind}", is_transposed=turned and "norm" not in part)


def _mixtral(spec: ModelSpec, name: str) -> Place:
    for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        name = name.replace(ours, theirs)
    return Place(name.replace(".mlp.router", ".block_sparse_moe.gate").replace(".mlp.", ".block_sparse_moe."))


_SPARSE = _renamed({"mlp.router": "mlp.gate"})
_PLACES: dict[str, Callable[[ModelSpec, str], Place]] = {
    "GemmaForCausalLM": _gemma({}),
    "Gemma2ForCausalLM": _gemma(_GEMMA),
    "Gemma3ForCausalLM": _gemma(_GEMMA),
    "Olmo2ForCausalLM": _renamed({name: _GEMMA[name] for name in ("attention_output_norm", "ffn_output_norm")}),
    "Phi3ForCausalLM": _phi3,
    "GPTNeoXForCausalLM": _gpt_neox,
    "GPT2LMHeadModel": _gpt2,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _SPARSE,
    "OlmoeForCausalLM": _SPARSE,
}
