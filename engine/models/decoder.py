"""The decoder-only model: a flattened ragged batch of tokens in, logits of the asked tokens out.

Knows layers and tensors; not batches, requests, files or the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from noria.engine.models.rope import RotaryAngles
from noria.engine.models.spec import ModelSpec
from noria.kernels.decode_buffers import DecodeBuffers, DecodePlanner
from noria.kernels.layers import LayerForm, LayerWeights, Norm, normed, run_layers
from noria.kernels.layout import RaggedLayout
from noria.kernels.low_rank import AdaptedOps, AdaptedRows, with_slots
from noria.kernels.ops import Ops, Scores
from noria.kernels.pools import KVPools


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, packed by the operations that compute with them. A pipeline stage has no embedding unless
    it is the first, no norm and no head unless it is the last."""

    embedding: Any | None  # [vocab, hidden], as `Ops.pack_table` laid it out
    positions: Any | None  # the same of learned positions
    layers: list[LayerWeights]
    norm: Norm | None
    head: Any | None  # [vocab, hidden], as `Ops.pack_linear` laid it out


class Model(Protocol):
    """What a runner asks of a model; see `Decoder`."""

    spec: ModelSpec
    ops: Ops

    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KVPools,
        layout: RaggedLayout,
        x: Tensor | None = None,
        adapted: Sequence[AdaptedRows] = (),
    ) -> Tensor: ...

    def final(self, hidden: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Decoder:
    """A decoder-only model with grouped-query attention, as its spec describes it. Holds weights only.

    Layers of Llama's form go through the backend's fused `run_layers`; others, and steps with adapters that it knows
    nothing of, are composed of the same operations, with a plan for each kind of attention and group of the KV cache
    that the layers have among them.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        self._weights = weights
        self._fused = ops.pack_layers(weights.layers) if spec.is_llama_shaped else None
        self._form = LayerForm(
            eps=spec.norm_eps,
            activation=spec.activation,
            is_gated=spec.gated,
            is_parallel=spec.residual == "parallel",
            residual_scale=spec.residual_scale,
        )
        kinds = [(layer.rope, layer.window) for layer in spec.layers]
        tables = {rope: RotaryAngles(rope, spec.head_dim) for rope in dict.fromkeys(rope for rope, _ in kinds)}
        self._attentions = [
            (tables[rope], Scores(spec.score_scale, window, spec.attention_softcap))
            for rope, window in dict.fromkeys(kinds)
        ]
        self._attention_of = [list(dict.fromkeys(kinds)).index(kind) for kind in kinds]
        self._ungrouped = [(kind, 0) for kind in self._attention_of]

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv: KVPools, layout: RaggedLayout, logit_rows: Tensor
    ) -> Tensor:
        """`hidden_states`, then `logits` of the tokens at logit_rows int64 [L] in 0 .. T - 1: float32 [L, vocab]."""
        hidden = self.hidden_states(token_ids, positions, kv, layout)
        return self.logits(hidden.index_select(0, logit_rows.to(hidden.device))).to("cpu")

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
        """Run T tokens through the stack, writing their keys and values into `kv`; [T, hidden].

        token_ids and positions int64 [T], flattened as `layout` says; positions count from 0 in each row.
        Hidden states are the operations' own: on their device and in their precision. `x`: those of the pipeline stage
        before, which take the place of the tokens' embeddings and may be overwritten. `adapted`: the tokens of each
        adapter; the model's own are the rest, and have the same bits as without any.
        """
        if x is None:
            x = self._embedded(token_ids, positions)
        longest = int(positions.max()) + 1 if len(positions) else 0
        heads = self.spec.num_heads
        plans = self._plans(
            kv,
            lambda group, angles, scores: self.ops.plan_step(
                layout.of(group), positions, angles.up_to(longest), kv, heads, scores
            ),
        )
        return self._through(x, kv, plans, adapted)

    def decode_plans(self, rows: DecodeBuffers, kv: KVPools) -> list[Any]:
        """Plans for `decode`, whatever the buffers hold when it runs. For operations that are a `DecodePlanner`."""
        ops, heads = cast(DecodePlanner, self.ops), self.spec.num_heads
        return self._plans(
            kv,
            lambda group, angles, scores: ops.plan_decode(rows, group, angles.up_to(rows.longest), kv, heads, scores),
        )

    @torch.inference_mode()
    def decode(self, rows: DecodeBuffers, kv: KVPools, plans: list[Any]) -> Tensor:
        """`hidden_states` of the tokens in the buffers, without a question to the host: [N, hidden]."""
        return self._through(self._embedded(rows.token_ids, rows.positions), kv, plans)

    def _plans(self, kv: KVPools, plan: Callable[[int, RotaryAngles, Scores], Any]) -> list[Any]:
        """One for each layer, by its group of the KV cache and its kind of attention; alike ones share theirs."""
        places = list(zip(self._attention_of, kv.groups, strict=True)) if kv.groups else self._ungrouped
        made = {(kind, group): plan(group, *self._attentions[kind]) for kind, group in dict.fromkeys(places)}
        return [made[place] for place in places]

    def _through(self, x: Tensor, kv: KVPools, plans: list[Any], adapted: Sequence[AdaptedRows] = ()) -> Tensor:
        if self._fused is not None and all(rows.packed is not None for rows in adapted):
            return self.ops.run_layers(x, self._fused, self.spec.norm_eps, kv, plans[0], adapted)
        if adapted:
            ops = cast(Ops, AdaptedOps(self.ops, adapted))
            return run_layers(ops, x, self._slotted, self._form, kv, plans)
        return run_layers(self.ops, x, self._weights.layers, self._form, kv, plans)

    @cached_property
    def _slotted(self) -> list[LayerWeights]:
        return with_slots(self._weights.layers)

    @torch.inference_mode()
    def final(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] behind the final norm, as embeddings are made of: float32, on the CPU."""
        return self._normed(hidden).to("cpu", torch.float32)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of hidden states [L, hidden]: float32 [L, vocab], where the operations leave them. The head
        is the largest matrix, so only the tokens that need it come here."""
        logits = self.ops.linear(self._normed(hidden), self._weights.head).to(torch.float32)
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        if self.spec.logit_softcap:
            logits.div_(self.spec.logit_softcap).tanh_().mul_(self.spec.logit_softcap)
        return logits

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.ops.embed(self._weights.embedding, token_ids)
        if self.spec.embedding_scale != 1.0:
            x.mul_(self.spec.embedding_scale)
        if self._weights.positions is not None:
            x.add_(self.ops.embed(self._weights.positions, positions))
        return x

    def _normed(self, hidden: Tensor) -> Tensor:
        if self._weights.norm is None:
            raise ValueError("only the last stage has a final norm")
        return normed(self.ops, hidden, self._weights.norm, self.spec.norm_eps)
