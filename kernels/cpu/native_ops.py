"""The operations on the C library: weights exactly as their files have them, activations rounded to 16 bits where
weights are integers, and the same bits for a token whoever its batch mates are and however it is computed.

Hands addresses to C and shapes nothing else. Knows no requests or models.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from noria.kernels.compiles import Compiles
from noria.kernels.cpu import structs
from noria.kernels.cpu.library import Unavailable
from noria.kernels.cpu.packing import PackedLinear, pack
from noria.kernels.cpu.pages import HugePages, zeros_when_read
from noria.kernels.cpu.structs import Adapted, Batch, Layer, Pools
from noria.kernels.layers import LayerWeights
from noria.kernels.layout import RaggedLayout
from noria.kernels.low_rank import LINEARS, AdaptedRows, LowRank, Place
from noria.kernels.ops import Scores
from noria.kernels.pools import KVPools
from noria.kernels.weights import Part

PAGE = 16
"""Tokens of a page; a KV block is one or several."""

QUERIES_AT_ONCE = 16
"""Queries of a prompt in one piece of work: enough that keys are read seldom, few enough to spread over threads."""


def check_sizes(hidden_size: int, head_dim: int, ffn_size: int, block_size: int) -> None:
    """Raises `Unavailable` for sizes that the kernels do not serve."""
    if hidden_size % 8 or head_dim % 8 or ffn_size % 8:
        raise Unavailable("the C kernels need hidden, head and feed-forward sizes that are multiples of 8")
    if block_size % PAGE:
        raise Unavailable(f"the C kernels need KV blocks of a multiple of {PAGE} tokens")


@dataclass(frozen=True, slots=True)
class PackedLayers:
    """`records` are what C is given; the weights that they point to are kept alive in `layers`."""

    records: Any  # an array of Layer
    layers: list[LayerWeights]


@dataclass(frozen=True, slots=True)
class NativePools(KVPools):
    """`records` are what C is given, one for each layer."""

    records: Any = field(init=False)  # an array of Pools

    def __post_init__(self) -> None:
        records = [Pools(k.data_ptr(), v.data_ptr()) for k, v in zip(self.keys, self.values, strict=True)]
        object.__setattr__(self, "records", (Pools * len(records))(*records))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`batch` is what C is given; the tensors that it points to are kept alive in `tensors`."""

    batch: Batch
    tensors: tuple[Tensor, ...]


class NativeOps:
    """See `ops.Ops`. Pools are [pages, Hk, D, 16] for keys and [pages, Hk, 16, D] for values."""

    name = "native"
    deterministic = True
    compiles = Compiles()  # none, ever
    device = torch.device("cpu")

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._memory = HugePages()

    def _run(self, name: str, *arguments: Any) -> None:
        """Call a function of the library with scratch of the size that it asks for."""
        function = getattr(self._library, name)
        needed = function(*arguments, None, self._threads)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        function(*arguments, self._scratch.data_ptr(), self._threads)

    # --- weights --------------------------------------------------------------------------------------------------

    def pack_linear(self, parts: Sequence[Part], bias: Tensor | None = None) -> PackedLinear:
        return pack(self._library, self._memory, parts, bias)

    def linear(self, x: Tensor, packed: PackedLinear, add_to: Tensor | None = None) -> Tensor:
        rows, width = len(x), packed.out_features
        out = torch.empty(rows, width) if add_to is None else add_to
        if rows:
            record = ctypes.addressof(packed.record)
            self._run(
                "noria_linear", record, x.data_ptr(), x.stride(0), rows, out.data_ptr(), width, add_to is not None
            )
        return out

    def pack_norm(self, weight: Tensor) -> Tensor:
        return weight

    def pack_table(self, weight: Part, head: PackedLinear | None) -> PackedLinear:
        return head if head is not None else self.pack_linear([weight])

    def embed(self, table: PackedLinear, ids: Tensor) -> Tensor:
        (segment,) = table.segments
        out = torch.empty(len(ids), table.in_features)
        self._library.noria_rows(
            segment.kind, segment.data, table.in_features, ids.data_ptr(), len(ids), out.data_ptr()
        )
        return out

    # --- attention ------------------------------------------------------------------------------------------------

    def new_kv_pools(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> NativePools:
        pages = num_blocks * block_size // PAGE

        def zeros(*shape: int) -> Tensor:
            return zeros_when_read(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

        keys = [zeros(pages, num_kv_heads, head_dim, PAGE) for _ in range(num_layers)]
        values = [zeros(pages, num_kv_heads, PAGE, head_dim) for _ in range(num_layers)]
        return NativePools(keys, values, block_size, num_kv_heads, head_dim)

    def plan_step(
        self, layout: RaggedLayout, positions: Tensor, angles: Tensor, kv: KVPools, num_heads: int, scores: Scores
    ) -> StepPlan:
        starts: list[int] = layout.query_start.tolist()
        lengths: list[int] = layout.kv_lens.tolist()
        tasks = [
            (lengths[row], row, first, min(first + QUERIES_AT_ONCE, starts[row + 1] - starts[row]))
            for row in range(len(lengths))
            for first in range(0, starts[row + 1] - starts[row], QUERIES_AT_ONCE)
        ]
        # The longest first: what is left to the end should be small.
        tasks.sort(key=lambda task: -task[0] * (task[3] - task[2]))
        pages, split = layout.block_table, kv.block_size // PAGE
        if split > 1:
            pages = (pages[..., None] * split + torch.arange(split, dtype=torch.int32)).flatten(1)
        tensors = (
            layout.query_start,
            layout.kv_lens,
            pages.contiguous(),
            torch.tensor([task[1:] for task in tasks], dtype=torch.int32),
            positions,
            layout.slot_mapping,
            angles,
        )
        batch = Batch(
            *(tensor.data_ptr() for tensor in tensors),
            table_width=pages.shape[1],
            num_tasks=len(tasks),
            num_tokens=starts[-1],
            longest=max(lengths, default=0),
            num_heads=num_heads,
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            half=kv.keys[0].dtype == torch.float16,
            scale=scores.scale,
            window=scores.window,
            softcap=scores.softcap,
        )
        return StepPlan(batch, tensors)

    def rope_write_kv(self, qkv: Tensor, kv: NativePools, layer: int, plan: StepPlan) -> Tensor:
        self._run("noria_rope_write_kv", ctypes.addressof(plan.batch), _at(kv, layer), qkv.data_ptr())
        return qkv.view(len(qkv), -1, kv.head_dim)[:, : plan.batch.num_heads]

    def ragged_attention(self, q: Tensor, kv: NativePools, layer: int, plan: StepPlan) -> Tensor:
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
        if len(q):
            batch = ctypes.addressof(plan.batch)
            self._run("noria_attention", batch, _at(kv, layer), q.data_ptr(), q.stride(0), out.data_ptr())
        return out

    # --- per token ------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._run("noria_rms_norm", x.data_ptr(), weight.data_ptr(), eps, len(x), x.shape[1], out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self._run("noria_silu_mul", gate_up.data_ptr(), rows, width, out.data_ptr())
        return out

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self._run("noria_gelu_mul", gate_up.data_ptr(), rows, width, out.data_ptr())
        return out

    # --- the stack ------------------------------------------------------------------------------------------------

    def pack_layers(self, layers: Sequence[LayerWeights]) -> PackedLayers:
        records = []
        for layer in layers:
            assert layer.attention_norm is not None and layer.ffn_norm is not None
            norms = (layer.attention_norm.weight.data_ptr(), layer.ffn_norm.weight.data_ptr())
            linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
            records.append(Layer(*norms, *(packed.record for packed in linears)))
        return PackedLayers((Layer * len(records))(*records), list(layers))

    def pack_low_ranks(self, pairs: Mapping[Place, LowRank], num_layers: int) -> Any:
        """An array of `structs.LowRank`; who holds the pairs keeps alive what they point to."""
        records = (structs.LowRank * (num_layers * len(LINEARS)))()
        for (layer, name), pair in pairs.items():
            record = records[layer * len(LINEARS) + LINEARS.index(name)]
            record.down, record.up = ctypes.pointer(pair.down.record), ctypes.pointer(pair.up.record)
        return records

    def run_layers(
        self,
        x: Tensor,
        layers: PackedLayers,
        eps: float,
        kv: NativePools,
        plan: StepPlan,
        adapted: Sequence[AdaptedRows] = (),
    ) -> Tensor:
        if len(x):
            batch, count = ctypes.addressof(plan.batch), len(layers.layers)
            groups = (Adapted * len(adapted))(*(Adapted(g.packed, g.start, g.stop - g.start) for g in adapted))
            self._run("noria_layers", layers.records, kv.records, count, batch, eps, groups, len(adapted), x.data_ptr())
        return x


def _at(kv: NativePools, layer: int) -> int:
    return ctypes.addressof(kv.records) + layer * ctypes.sizeof(Pools)
