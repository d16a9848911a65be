"""The operations that a decoder is made of, and the choice of what computes them on this machine.

`Ops` is the seam: plain torch (`torch_ops.py`) runs everywhere, the C library (`cpu/native_ops.py`) on CPUs with AVX2.
`reference.py` says what each operation means. Knows no requests or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from noria.kernels.cpu import library, native_ops
from noria.kernels.cpu.native_ops import NativeOps
from noria.kernels.layers import LayerWeights
from noria.kernels.layout import RaggedLayout
from noria.kernels.pools import KVPools
from noria.kernels.torch_ops import TorchOps
from noria.kernels.weights import Weight

KINDS = ("auto", "native", "torch")


class Ops(Protocol):
    """One backend. Its packed weights, tables, pools and plans are its own and opaque to callers. Float32 throughout;
    called by one thread at a time."""

    name: str

    def pack_linear(self, parts: Sequence[Weight], bias: Tensor | None = None) -> Any:
        """Weights [O_i, C], stacked in order to [O, C], laid out for `linear`; bias [O]."""

    def linear(self, x: Tensor, packed: Any, add_to: Tensor | None = None) -> Tensor:
        """x [T, C] times the transpose of the packed weight, plus its bias -> [T, O]. With `add_to` [T, O] the product
        is added to that, which is overwritten and returned."""

    def pack_table(self, weight: Weight, head: Any | None) -> Any:
        """An embedding table [V, C] for `embed`; `head` is the packed linear of the same weight, where there is one."""

    def embed(self, table: Any, ids: Tensor) -> Tensor:
        """Rows of the table: int64 [T] -> [T, C]."""

    def new_kv_pools(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVPools:
        """Empty pools. The system hands out zeroed pages on first touch: memory is taken as blocks are written."""

    def plan_step(
        self, layout: RaggedLayout, positions: Tensor, angles: Tensor, kv: KVPools, num_heads: int, scale: float
    ) -> Any:
        """What all layers of a step share. positions int64 [T]; angles [positions, D]: cosines, then sines, of each
        position's D / 2 rotary angles; `num_heads` is Hq; `scale` multiplies the scores."""

    def rope_write_kv(self, qkv: Tensor, kv: KVPools, layer: int, plan: Any) -> Tensor:
        """Rotate the queries and keys of qkv [T, (Hq + 2 Hk) D], store keys and values at their slots in the layer's
        pools -> rotated queries [T, Hq, D]. qkv may be overwritten."""

    def ragged_attention(self, q: Tensor, kv: KVPools, layer: int, plan: Any) -> Tensor:
        """Causal attention of q [T, Hq, D] over the rows' blocks -> [T, Hq D]. This step's keys and values must be
        written. Rows read their own tokens and nothing else of the pools."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm of the rows of x [T, C] with weight [C]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2F] = gate beside up -> [T, F]."""

    def pack_layers(self, layers: Sequence[LayerWeights]) -> Any:
        """A decoder's layers, their linears packed here, for `run_layers`."""

    def run_layers(self, x: Tensor, layers: Any, eps: float, kv: KVPools, plan: Any) -> Tensor:
        """x [T, C] through all layers, bit for bit as `layers.run_layers` composes them of the operations above. x may
        be overwritten."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a backend must be able to hold: see `native_ops.check_sizes`."""

    hidden_size: int
    head_dim: int
    ffn_size: int
    block_size: int


def choose(kind: str, sizes: Sizes, threads: int, note: Callable[[str], None] | None = None) -> Ops:
    """The backend named by `kind`; "auto" is the C library where it can be had and serves such sizes, else torch, and
    `note` is told why. Raises ValueError where "native" cannot be had."""
    if kind not in KINDS:
        raise ValueError(f"kernels {kind!r} are not known: {', '.join(KINDS)}")
    if kind != "torch":
        try:
            native_ops.check_sizes(sizes.hidden_size, sizes.head_dim, sizes.ffn_size, sizes.block_size)
            return NativeOps(library.load(), threads)
        except library.Unavailable as error:
            if kind == "native":
                raise ValueError(f"native kernels cannot be had: {error}") from error
            if note is not None:
                note(str(error))
    return TorchOps()
