"""config.json of the families that we compute ourselves, as a ModelSpec: one function for each way of saying it.

Knows Hugging Face's keys and what a family means by leaving one out; no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from noria.engine.models.hf_rope import read_rope, rope_settings
from noria.engine.models.spec import ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, layer_count

Config = dict[str, Any]
Fields = dict[str, Any]

NO_ARCHITECTURE = "(none)"

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}


def spec_from_config(config: Config, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    """The model's shape. KeyError, TypeError or ValueError where the file is not complete, or asks for something that
    is not computed here; the message of a ValueError says what."""
    architecture = architecture_of(config)
    fields = READERS[architecture](config)
    stretch = [layer.rope.factor for layer in fields["layers"] if layer.rope and layer.rope.kind == "dynamic"]
    fields["max_len"] = int(fields["max_len"] * max(stretch, default=1.0))
    return ModelSpec(architecture=architecture, eos_token_ids=eos_token_ids, **fields)


def architecture_of(config: Config) -> str:
    return str((config.get("architectures") or [NO_ARCHITECTURE])[0])


# --- the parts that most share --------------------------------------------------------------------------------------


def _base(config: Config, *, tied: bool = False, act: str = "silu", head_dim: int = 0, eps: float = 1e-6) -> Fields:
    """What nearly all say in the same words; the arguments are the family's own values where the file is silent."""
    num_heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or num_heads),
        "head_dim": int(config.get("head_dim") or head_dim or hidden // num_heads),
        "ffn_size": int(config["intermediate_size"]),
        "norm_eps": float(config.get("rms_norm_eps", eps)),
        "max_len": int(config["max_position_embeddings"]),
        "tied": bool(config.get("tie_word_embeddings", tied)),
        "activation": _activation(str(config.get("hidden_act", act))),
    }


def _activation(name: str) -> Literal["silu", "gelu", "gelu_tanh"]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported")
    return _ACTIVATIONS[name]


def _alike(config: Config, fields: Fields, rope: RopeSpec | None, window: int = 0) -> Fields:
    """All layers alike."""
    window = window if window < fields["max_len"] else 0
    return {"layers": (LayerSpec(rope, window),) * _num_layers(config)}


def _num_layers(config: Config) -> int:
    return layer_count(int(config["num_hidden_layers"]))


def _rope(config: Config, fields: Fields, base: float = 10000.0, share: float = 1.0) -> RopeSpec:
    settings = rope_settings(config, "full_attention")
    return read_rope(settings, config, fields["head_dim"], base=base, share=share)


def _layer_types(config: Config, slides: Callable[[int], bool]) -> list[bool]:
    """For each layer, whether it slides; `slides` is the family's own pattern."""
    types, count = config.get("layer_types"), _num_layers(config)
    if types is None:
        return [slides(index) for index in range(count)]
    if len(types) != count or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer types {sorted(set(types))} for {count} layers are not supported")
    return [kind == "sliding_attention" for kind in types]


def _refuse(config: Config, *keys: str) -> None:
    for key in keys:
        if config.get(key):
            raise ValueError(f"{key} = {config[key]!r} is not supported")


# --- families -------------------------------------------------------------------------------------------------------


def _llama(config: Config) -> Fields:
    _refuse(config, "sliding_window")
    fields = _base(config)
    bias = bool(config.get("attention_bias", False))
    fields |= {"qkv_bias": bias, "output_bias": bias, "ffn_bias": bool(config.get("mlp_bias", False))}
    return fields | _alike(config, fields, _rope(config, fields))


def _mistral(config: Config) -> Fields:
    fields = _base(config)
    return fields | _alike(config, fields, _rope(config, fields), int(config.get("sliding_window", 4096) or 0))


def _mixtral(config: Config) -> Fields:
    fields = _base(config, eps=1e-5)
    window = int(config.get("sliding_window") or 0)
    fields |= _alike(config, fields, _rope(config, fields, 1000000.0), window)
    per_token = int(config.get("num_experts_per_tok", 2))
    experts = ExpertsSpec(int(config["num_local_experts"]), per_token, fields["ffn_size"], True)
    return fields | _sparse(fields, experts)


def _qwen2(config: Config) -> Fields:
    fields = _base(config) | {"qkv_bias": True}
    rope, window = _rope(config, fields), 0
    if config.get("use_sliding_window"):
        window = int(config.get("sliding_window") or 0)
    from_layer = int(config.get("max_window_layers", 28))
    sliding = _layer_types(config, lambda index: index >= from_layer)
    return fields | {"layers": tuple(LayerSpec(rope, window if slides else 0) for slides in sliding)}


def _qwen3(config: Config) -> Fields:
    bias = bool(config.get("attention_bias", False))
    own = {"qkv_bias": bias, "output_bias": bias, "head_norm": "head"}
    return _qwen2({**config, "head_dim": config.get("head_dim") or 128}) | own


def _qwen3_moe(config: Config) -> Fields:
    fields = _qwen3({**config, "intermediate_size": config.get("intermediate_size", 6144)})
    num = int(config.get("num_local_experts") or config["num_experts"])
    per_token, normalised = int(config.get("num_experts_per_tok", 8)), bool(config.get("norm_topk_prob", False))
    experts = ExpertsSpec(num, per_token, int(config["moe_intermediate_size"]), normalised)
    dense, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step", 1))
    return fields | _sparse(fields, experts, lambda index: index not in dense and (index + 1) % step == 0)


def _olmoe(config: Config) -> Fields:
    _refuse(config, "clip_qkv")
    fields = _llama({**config, "rms_norm_eps": config.get("rms_norm_eps", 1e-5)}) | {"head_norm": "width"}
    num, per_token = int(config["num_experts"]), int(config.get("num_experts_per_tok", 8))
    experts = ExpertsSpec(num, per_token, fields["ffn_size"], bool(config.get("norm_topk_prob", False)))
    return fields | _sparse(fields, experts)


def _sparse(fields: Fields, experts: ExpertsSpec, where: Callable[[int], bool] = lambda index: True) -> Fields:
    layers = (LayerSpec(layer.rope, layer.window, where(index)) for index, layer in enumerate(fields["layers"]))
    return {"layers": tuple(layers), "experts": experts}


def _olmo2(config: Config) -> Fields:
    return _llama({**config, "rms_norm_eps": config.get("rms_norm_eps", 1e-5)}) | {
        "residual": "post",
        "head_norm": "width",
    }


def _smollm3(config: Config) -> Fields:
    tied = config.get("tie_word_embeddings", True)
    fields = _llama({**config, "tie_word_embeddings": tied, "sliding_window": None})
    rope, count = _rope(config, fields, 2000000.0), _num_layers(config)
    step = int(config.get("no_rope_layer_interval") or 4)
    turns = config.get("no_rope_layers") or [int((index + 1) % step != 0) for index in range(count)]
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    sliding = _layer_types(config, lambda index: bool(window) and not turns[index])
    layers = [
        LayerSpec(rope if turn else None, window if slides else 0) for turn, slides in zip(turns, sliding, strict=True)
    ]
    return fields | {"layers": tuple(layers)}


def _granite(config: Config) -> Fields:
    return _llama(config) | {
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / float(config.get("logits_scaling", 1.0)),
    }


def _phi3(config: Config) -> Fields:
    fields = _base(config, eps=1e-5)
    return fields | _alike(config, fields, _rope(config, fields), int(config.get("sliding_window") or 0))


def _gemma(config: Config) -> Fields:
    # Older files spell the activation of the first Gemma wrongly: it is this one whatever `hidden_act` says.
    act = config.get("hidden_activation") or "gelu_pytorch_tanh"
    fields = _base({**config, "hidden_act": act}, tied=True, head_dim=256)
    bias = bool(config.get("attention_bias", False))
    fields |= {"qkv_bias": bias, "output_bias": bias, "embedding_scale": fields["hidden_size"] ** 0.5}
    return fields | _alike(config, fields, _rope(config, fields))


def _gemma2(config: Config) -> Fields:
    _refuse(config, "use_bidirectional_attention")
    fields = _gemma(config) | {
        "residual": "sandwich",
        "attention_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_softcap": float(config.get("attn_logit_softcapping", 50.0) or 0.0),
        "logit_softcap": float(config.get("final_logit_softcapping", 30.0) or 0.0),
    }
    rope, window = _rope(config, fields), int(config.get("sliding_window", 4096) or 0)
    sliding = _layer_types(config, lambda index: index % 2 == 0)
    return fields | {"layers": tuple(LayerSpec(rope, window if slides else 0) for slides in sliding)}


def _gemma3(config: Config) -> Fields:
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "max_position_embeddings": 131072}
    config = {**uncapped, **config}
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    config["layer_types"] = config.get("layer_types") or [
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(_num_layers(config))
    ]
    fields = _gemma2(config) | {"head_norm": "head"}
    full = _rope(config, fields, 1000000.0)
    sliding = rope_settings(config, "sliding_attention")
    if "sliding_attention" not in (config.get("rope_parameters") or {}):
        sliding = {"rope_theta": config.get("rope_local_base_freq")}  # the scaling is for the other layers alone
    local = read_rope(sliding, config, fields["head_dim"], base=10000.0)
    layers = (LayerSpec(local if layer.window else full, layer.window) for layer in fields["layers"])
    return fields | {"layers": tuple(layers)}


def _stablelm(config: Config) -> Fields:
    _refuse(config, "qk_layernorm")
    fields = _base(config) | {"norm_eps": float(config.get("layer_norm_eps", 1e-5)), "norm": "layer", "norm_bias": True}
    fields["qkv_bias"] = bool(config.get("use_qkv_bias", False))
    if config.get("use_parallel_residual", False):
        fields |= {"residual": "parallel", "ffn_norm": False}
    return fields | _alike(config, fields, _rope(config, fields, share=0.25))


def _gpt_neox(config: Config) -> Fields:
    fields = _base(config, act="gelu") | {"norm_eps": float(config.get("layer_norm_eps", 1e-5)), "gated": False}
    bias = bool(config.get("attention_bias", True))
    fields |= {"norm": "layer", "norm_bias": True, "qkv_bias": bias, "output_bias": bias, "ffn_bias": True}
    fields["residual"] = "parallel" if config.get("use_parallel_residual", True) else "pre"
    return fields | _alike(config, fields, _rope(config, fields, share=float(config.get("rotary_pct", 0.25))))


def _gpt2(config: Config) -> Fields:
    _refuse(config, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    renamed = {
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "num_hidden_layers": config["n_layer"],
        "max_position_embeddings": config["n_positions"],
        "intermediate_size": config.get("n_inner") or 4 * int(config["n_embd"]),
        "hidden_act": config.get("activation_function", "gelu_new"),
    }
    config = {**config, **renamed}
    fields = _base(config, tied=True) | {"norm_eps": float(config.get("layer_norm_epsilon", 1e-5)), "gated": False}
    fields |= {"norm": "layer", "norm_bias": True, "qkv_bias": True, "output_bias": True, "ffn_bias": True}
    fields |= {"num_positions": fields["max_len"]}
    if not config.get("scale_attn_weights", True):
        fields["attention_scale"] = 1.0
    return fields | _alike(config, fields, None)


READERS: dict[str, Callable[[Config], Fields]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "SmolLM3ForCausalLM": _smollm3,
    "GraniteForCausalLM": _granite,
    "StableLmForCausalLM": _stablelm,
    "GPTNeoXForCausalLM": _gpt_neox,
    "GPT2LMHeadModel": _gpt2,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "OlmoeForCausalLM": _olmoe,
}
"""By the first of config.json's `architectures`."""
