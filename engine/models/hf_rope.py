"""The rotary settings of a config.json, in the two spellings that transformers has had, as a RopeSpec.

Knows those keys; what they mean is `rope`'s.
"""

from __future__ import annotations

import math
from typing import Any

from noria.engine.models.spec import RopeSpec

Settings = dict[str, Any]

PER_LAYER_TYPE = ("full_attention", "sliding_attention")


def rope_settings(config: Settings, layer_type: str) -> Settings:
    """What holds for layers of the type, in transformers 5's spelling: one object. Before, base and share of the head
    stood beside the scaling."""
    settings = config.get("rope_parameters") or {}
    if any(key in settings for key in PER_LAYER_TYPE):
        return dict(settings.get(layer_type) or {})
    if settings:
        return dict(settings)
    scaling = config.get("rope_scaling") or {}
    base = config.get("rope_theta") or config.get("rotary_emb_base")
    return {**scaling, **({"rope_theta": base} if base else {})}


def read_rope(settings: Settings, config: Settings, head_dim: int, *, base: float, share: float = 1.0) -> RopeSpec:
    """`base` and `share` (of the head's channels) are the family's own, where the file says nothing. KeyError or
    ValueError for settings that are not complete or of no kind that is known."""
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    if kind == "su" or (kind == "yarn" and config.get("model_type") == "phi3"):  # what longrope was called before
        kind = "longrope"
    for given in (settings.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if given is not None:
            share = float(given)
            break
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ValueError(f"rotary embedding of {share} of a head of {head_dim} channels")
    known: dict[str, Any] = {"base": float(settings.get("rope_theta") or base), "dim": 0 if dim == head_dim else dim}
    if kind == "default":
        return RopeSpec(**known)
    if kind == "linear":
        return RopeSpec(**known, kind="linear", factor=float(settings["factor"]))
    max_len = int(config["max_position_embeddings"])
    if kind == "dynamic":
        return RopeSpec(**known, kind="dynamic", factor=float(settings["factor"]), original_max_len=max_len)
    # Phi-3 keeps this one beside the scaling, and there it goes before.
    given = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    known["original_max_len"] = int(given or max_len)
    if kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            known[name] = float(settings[name])
        return RopeSpec(**known, kind="llama3")
    if kind == "yarn":
        return _yarn(settings, known, max_len)
    if kind == "longrope":
        return _longrope(settings, known, max_len, (dim or head_dim) // 2)
    raise ValueError(f"rope scaling {kind!r} is not supported")


def _yarn(settings: Settings, known: Settings, max_len: int) -> RopeSpec:
    factor = float(settings.get("factor") or max_len / known["original_max_len"])
    attention = settings.get("attention_factor")
    if attention is None:
        some, every = settings.get("mscale"), settings.get("mscale_all_dim")
        attention = _grown(factor, some) / _grown(factor, every) if some and every else _grown(factor, 1.0)
    return RopeSpec(
        **known,
        kind="yarn",
        factor=factor,
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        whole_steps=bool(settings.get("truncate", True)),
        attention_factor=float(attention),
    )


def _grown(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(settings: Settings, known: Settings, max_len: int, num_pairs: int) -> RopeSpec:
    original = known["original_max_len"]
    factor = float(settings.get("factor") or max_len / original)
    attention = settings.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    long, short = (tuple(map(float, settings[f"{name}_factor"])) for name in ("long", "short"))
    if len(long) != num_pairs or len(short) != num_pairs:
        raise ValueError(f"longrope has {len(long)} and {len(short)} factors, not {num_pairs}")
    return RopeSpec(**known, kind="longrope", factors=long, short_factors=short, attention_factor=float(attention))
