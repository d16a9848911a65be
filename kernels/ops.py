"""The operations that a decoder is made of: the seam between models and what computes them.

`reference.py` says what each operation means, `choice.py` chooses who computes it. Knows no requests or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from noria.kernels.compiles import Compiles
from noria.kernels.layout import RaggedLayout
from noria.kernels.pools import KVPools
from noria.kernels.weights import Part

Packed = Any
"""A linear layer as `Ops.pack_linear` laid it out."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How attention weighs keys: scores are multiplied by `scale`, and become softcap * tanh(s / softcap) where that is
    not 0; a query sees the last `window` tokens up to its own, all of them with 0."""

    scale: float
    window: int = 0
    softcap: float = 0.0


class Ops(Protocol):
    """One backend. Its packed weights, tables, pools and plans are its own and opaque to callers, and so are where
    activations lie and how precise they are: float32 on the CPU. Called by one thread at a time."""

    name: str
    deterministic: bool  # whether a token has the same bits alone and in any batch
    compiles: Compiles
    device: torch.device  # of activations and pools; ids, positions, layouts and angles come from the CPU

    def pack_linear(self, parts: Sequence[Part], bias: Tensor | None = None) -> Any:
        """Weights [O_i, C], stacked in order to [O, C], laid out for `linear`; bias [O]."""

    def linear(self, x: Tensor, packed: Any, add_to: Tensor | None = None) -> Tensor:
        """x [T, C] times the transpose of the packed weight, plus its bias -> [T, O]. With `add_to` [T, O] the product
        is added to that, which is overwritten and returned."""

    def pack_norm(self, weight: Tensor) -> Tensor:
        """A norm's weight [C], for `rms_norm`."""

    def pack_table(self, weight: Part, head: Any | None) -> Any:
        """An embedding table [V, C] for `embed`; `head` is the packed linear of the same weight, where there is one."""

    def embed(self, table: Any, ids: Tensor) -> Tensor:
        """Rows of the table: int64 [T] -> [T, C]."""

    def new_kv_pools(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVPools:
        """Empty pools, of this backend's own kind. The system hands out zeroed pages on first touch: memory is taken as
        blocks are written."""

    def plan_step(
        self, layout: RaggedLayout, positions: Tensor, angles: Tensor, kv: Any, num_heads: int, scores: Scores
    ) -> Any:
        """What the layers of a step share. positions int64 [T]; angles [positions, D]: cosines, then sines, of each
        position's D / 2 rotary angles; `num_heads` is Hq."""

    def rope_write_kv(self, qkv: Tensor, kv: Any, layer: int, plan: Any) -> Tensor:
        """Rotate the queries and keys of qkv [T, (Hq + 2 Hk) D], store keys and values at their slots in the layer's
        pools -> rotated queries [T, Hq, D]. qkv may be overwritten."""

    def ragged_attention(self, q: Tensor, kv: Any, layer: int, plan: Any) -> Tensor:
        """Causal attention of q [T, Hq, D] over the rows' blocks -> [T, Hq D]. This step's keys and values must be
        written. Rows read their own tokens and nothing else of the pools."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm of the rows of x [T, C] with weight [C]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2F] = gate beside up -> [T, F]."""

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """The same with gelu in its tanh form."""

    def pack_layers(self, layers: Sequence[Any]) -> Any:
        """A decoder's layers (`layers.LayerWeights`) of Llama's form, their linears packed here, for `run_layers`."""

    def pack_low_ranks(self, pairs: Mapping[Any, Any], num_layers: int) -> Any | None:
        """An adapter (`low_rank.LowRank` by place), its linears packed here, for `run_layers`; None where that knows no
        adapters, and they are composed (`low_rank.AdaptedOps`)."""

    def run_layers(self, x: Tensor, layers: Any, eps: float, kv: Any, plan: Any, adapted: Sequence[Any] = ()) -> Tensor:
        """x [T, C] through all layers, bit for bit as `layers.run_layers` composes Llama's of the operations above, and
        as that does with `adapted` tokens (`low_rank.AdaptedRows`), where their adapters were packed for it. x
        may be overwritten."""
