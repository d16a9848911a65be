"""Any other decoder: transformers' own module computes it, and its attention is our ragged paged one.

Slower than our own layers, and in float32 on the CPU. Knows transformers' attention interface and no family.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from noria.engine.models.errors import ModelError
from noria.engine.models.safetensors_checkpoint import read_json
from noria.engine.models.spec import LayerSpec, ModelSpec
from noria.kernels.layout import RaggedLayout
from noria.kernels.low_rank import AdaptedRows
from noria.kernels.ops import Ops, Scores
from noria.kernels.pools import KVPools

ATTENTION = "noria_ragged"
TOLERANCE = 1e-3  # of the largest logit, for the check at the load
_PROBE = 11  # tokens of it
_KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache", "cache_position"}
"""What a module may tell attention. Anything else that is not None changes what is computed in a way not known here."""


@dataclass(slots=True)
class _Step:
    """What attention needs of the iteration that is being computed."""

    ops: Ops
    kv: KVPools
    layout: RaggedLayout
    positions: Tensor
    windows: tuple[int, ...]  # by layer
    plans: dict[tuple[Scores, int], Any] = field(default_factory=dict)
    layers: set[int] = field(default_factory=set)  # that have asked

    def plan(self, scores: Scores, num_heads: int, group: int) -> Any:
        if (scores, group) not in self.plans:
            # The module has rotated queries and keys already: here they turn by nothing.
            half = self.kv.head_dim // 2
            still = torch.cat((torch.ones(1, half), torch.zeros(1, half)), dim=1)
            nowhere = torch.zeros_like(self.positions)
            layout = self.layout.of(group)
            self.plans[scores, group] = self.ops.plan_step(layout, nowhere, still, self.kv, num_heads, scores)
        return self.plans[scores, group]


_current: ContextVar[_Step] = ContextVar("step")
"""The interface hands attention nothing of ours, and not every module passes on what it does not know."""


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **told: Any
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hk, T, D] of T flattened tokens -> [1, T, Hq, D]."""
    step = _current.get()
    strange = sorted(name for name, given in told.items() if given is not None and name not in _KNOWN)
    if strange:
        raise ModelError(f"attention with {', '.join(strange)} is not supported")
    layer, heads = int(module.layer_idx), query.shape[1]
    if key.shape != value.shape or key.shape[1::2] != (step.kv.num_kv_heads, step.kv.head_dim):
        raise ModelError(f"layer {layer} has keys {list(key.shape)} and values {list(value.shape)}: not supported")
    step.layers.add(layer)
    window, kept = told.get("sliding_window") or step.windows[layer], step.windows[layer]
    if kept and window > kept:
        raise ModelError(f"layer {layer} sees {window} tokens where its configuration says {kept}: not supported")
    scale = told.get("scaling") or query.shape[3] ** -0.5
    scores = Scores(float(scale), int(window), float(told.get("softcap") or 0.0))
    plan = step.plan(scores, heads, step.kv.group_of(layer))
    qkv = torch.cat((query, key, value), dim=1)[0].transpose(0, 1).flatten(1)  # [T, (Hq + 2 Hk) * D]
    queries = step.ops.rope_write_kv(qkv.contiguous(), step.kv, layer, plan)
    attended = step.ops.ragged_attention(queries, step.kv, layer, plan)
    return attended.view(1, -1, heads, query.shape[3]), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *_, **__: None)


def foreign_spec(folder: Path) -> ModelSpec:
    """The shape of a folder's model, as far as memory and scheduling need it. ModelError says what is not supported."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds
        raise _refused(folder, str(error)) from error
    architecture = str((config.architectures or ["(none)"])[0])
    if type(module).__name__ != architecture or config.is_encoder_decoder:
        raise _refused(folder, "transformers has no such decoder")
    if not module._supports_attention_backend:
        raise _refused(folder, "transformers has it without an attention interface")
    text = config.get_text_config(decoder=True)
    generation = read_json(folder / "generation_config.json")
    ids = generation.get("eos_token_id", getattr(text, "eos_token_id", None))
    try:
        heads = int(text.num_attention_heads)
        return ModelSpec(
            architecture=architecture,
            vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            num_heads=heads,
            num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            ffn_size=0,
            norm_eps=0.0,
            max_len=int(text.max_position_embeddings),
            layers=_layers(text),
            tied=False,
            eos_token_ids=tuple(sorted({int(i) for i in (ids if isinstance(ids, list) else [ids]) if i is not None})),
            foreign_parameters=sum(parameter.numel() for parameter in module.parameters()),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise _refused(folder, str(error)) from error


def _layers(text: Any) -> tuple[LayerSpec, ...]:
    count, window = int(text.num_hidden_layers), getattr(text, "sliding_window", None)
    if not getattr(text, "use_sliding_window", True):
        window = None
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * count
    if others := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"it has layers of {', '.join(others)}")
    return tuple(LayerSpec(None, int(window or 0) if kind == "sliding_attention" else 0) for kind in types)


def _refused(folder: Path, reason: str) -> ModelError:
    architecture = (read_json(folder / "config.json").get("architectures") or ["(none)"])[0]
    return ModelError(f"{folder}: architecture {architecture!r} is not supported: {' '.join(reason.split())[:200]}")


class ForeignDecoder:
    """See `decoder.Model`. Hidden states are behind the module's final norm."""

    def __init__(self, folder: Path, spec: ModelSpec, ops: Ops) -> None:
        """Loads the weights and checks that, chunk by chunk beside another text, our attention gives what the module's
        own gives in one piece. ModelError where it does not."""
        self.spec = spec
        self.ops = ops
        self._windows = tuple(layer.window for layer in spec.layers)
        self._hidden: Tensor | None = None  # what the head is to be applied to
        try:
            self._module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, attn_implementation="eager"
            ).eval()
        except Exception as error:  # transformers raises many kinds
            raise ModelError(f"{folder}: cannot be loaded: {' '.join(str(error).split())[:200]}") from error
        self._base: Any = self._module.get_decoder()
        self._own_forward = self._base.forward
        with torch.inference_mode():
            ids = torch.arange(3, 3 + _PROBE) % spec.vocab_size
            wanted = self._module(input_ids=ids[None], use_cache=False).logits[0]
            self._module.set_attn_implementation(ATTENTION)
            self._base.forward = self._forward
            try:
                found = self._probe(ids)
            except (ModelError, RuntimeError, TypeError, AttributeError, ValueError) as error:
                raise _refused(folder, str(error)) from error
        if not float((found - wanted).abs().max()) < TOLERANCE * float(wanted.abs().max()):
            raise _refused(folder, "its layers need more than attention over their own keys")

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv: KVPools, layout: RaggedLayout, logit_rows: Tensor
    ) -> Tensor:
        return self.logits(self.hidden_states(token_ids, positions, kv, layout).index_select(0, logit_rows))

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KVPools,
        layout: RaggedLayout,
        x: Tensor | None = None,
        adapted: Sequence[AdaptedRows] = (),
    ) -> Tensor:
        hidden, _ = self._run(token_ids, positions, kv, layout)
        return hidden

    @torch.inference_mode()
    def final(self, hidden: Tensor) -> Tensor:
        return hidden.to("cpu", torch.float32)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The module's own head, with all that it does to logits."""
        if not len(hidden):
            return torch.empty(0, self.spec.vocab_size)
        self._hidden = hidden
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64)  # nobody looks at them
            logits: Tensor = self._module(input_ids=ids, use_cache=False).logits
            return logits[0]
        finally:
            self._hidden = None

    def _forward(self, *arguments: Any, **given: Any) -> Any:
        if self._hidden is not None:
            return BaseModelOutputWithPast(last_hidden_state=self._hidden[None])
        return self._own_forward(*arguments, **given)

    def _run(self, token_ids: Tensor, positions: Tensor, kv: KVPools, layout: RaggedLayout) -> tuple[Tensor, set[int]]:
        if not len(token_ids):
            return torch.empty(0, self.spec.hidden_size), set()
        step = _Step(self.ops, kv, layout, positions, self._windows)
        before = _current.set(step)
        try:
            out = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            _current.reset(before)
        return out.last_hidden_state[0], step.layers

    def _probe(self, ids: Tensor) -> Tensor:
        """Logits of `ids` in two chunks of a prompt and then as decoded tokens, beside a text of other tokens."""
        spec = self.spec
        kv = self.ops.new_kv_pools(spec.num_layers, 3, 16, spec.num_kv_heads, spec.head_dim, torch.float32)
        found, ends = [], [0, 4, 9, *range(10, len(ids) + 1)]
        for start, end in pairwise(ends):
            decoded = 2 if start >= ends[2] else 0
            layout = RaggedLayout.build([(start, end - start, [1]), (start, end - start, [2])], decoded, 16)
            tokens = torch.cat((ids[start:end], ids.flip(0)[start:end]))
            hidden, asked = self._run(tokens, torch.arange(start, end).repeat(2), kv, layout)
            if missing := sorted(set(range(spec.num_layers)) - asked):
                raise ModelError(f"layers {', '.join(map(str, missing[:4]))} have no attention of the usual kind")
            found.append(self.logits(hidden)[: end - start])
        return torch.cat(found)


def fingerprint_of(model: ForeignDecoder) -> str:
    """Hash of the shape and of a few weights."""
    digest = hashlib.sha256(f"foreign {model.ops.name} {sorted(asdict(model.spec).items())}".encode())
    for parameter in list(model._module.parameters())[-3:]:
        digest.update(parameter.detach().flatten()[:4096].numpy().tobytes())
    return f"fp_{digest.hexdigest()[:12]}"
