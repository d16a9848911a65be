"""Where a GGUF file has the model's tensors: llama.cpp's names, what it keeps fused, and its order of rotary pairs.

Knows names and shapes; opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

from noria.engine.models.gguf_spec import PAIRED
from noria.engine.models.places import Place
from noria.engine.models.spec import ModelSpec

_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attention_output_norm": "post_attention_norm",
    "ffn_output_norm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
}
_TABLES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embed_positions.weight": "position_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_FUSED = ("phi3", "gptneox", "gpt2")


def gguf_place(spec: ModelSpec, name: str) -> Place:
    """Where the file of the spec's architecture has the model's tensor."""
    if name in _TABLES:
        return Place(_TABLES[name])
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    at = f"blk.{layer}."
    expert = _EXPERT.fullmatch(part)
    if expert and spec.experts:
        rows = spec.hidden_size if expert[2] == "down" else spec.experts.ffn_size
        return Place(f"{at}ffn_{expert[2]}_exps.{kind}", int(expert[1]) * rows, rows)
    if spec.architecture in _FUSED and part.startswith("self_attn.") and part[10:] in ("q_proj", "k_proj", "v_proj"):
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        first, count = {"q": (0, queries), "k": (queries, keys), "v": (queries + keys, keys)}[part[10]]
        return Place(f"{at}attn_qkv.{kind}", first, count)
    if spec.architecture == "phi3" and part in ("mlp.gate_proj", "mlp.up_proj"):
        return Place(f"{at}ffn_up.{kind}", spec.ffn_size * (part == "mlp.up_proj"), spec.ffn_size)
    return Place(f"{at}{_PARTS[part]}.{kind}", order=_order(spec, part))


def _order(spec: ModelSpec, part: str) -> Callable[[Tensor], Tensor] | None:
    if spec.architecture not in PAIRED or part not in ("self_attn.q_proj", "self_attn.k_proj"):
        return None

    def half_rotation(values: Tensor) -> Tensor:
        """Undo llama.cpp's order of a head's channels, where rotary pairs are neighbours: (0, 1), (2, 3), ..."""
        turning = spec.head_dim // 2 * 2
        if not turning or len(values) % turning:
            return values  # of another shape than the model's, as is told where shapes are checked
        pairs = values.view(-1, spec.head_dim // 2, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)

    return half_rotation
