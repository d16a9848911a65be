"""The operations on the C library: weights exactly as their files have them, activations rounded to 16 bits where
weights are integers, and the same bits for a token whoever its batch mates are and however it is computed.

Hands addresses to C and shapes nothing else. Knows no requests or models.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from noria.kernels.compiles import Compiles
from noria.kernels.cpu import structs
from noria.kernels.cpu.library import Unavailable
from noria.kernels.cpu.pages import HugePages, zeros_when_read
from noria.kernels.cpu.structs import Adapted, Batch, Layer, Linear, Pools, Segment
from noria.kernels.layers import LayerWeights
from noria.kernels.layout import RaggedLayout
from noria.kernels.low_rank import LINEARS, AdaptedRows, LowRank, Place
from noria.kernels.ops import Scores
from noria.kernels.pools import KVPools
from noria.kernels.weights import GroupedWeight, Weight, as_floats

PAGE = 16
"""Tokens of a page; a KV block is one or several."""

QUERIES_AT_ONCE = 16
"""Queries of a prompt in one piece of work: enough that keys are read seldom, few enough to spread over threads."""

F32, F16, BF16, Q4, Q8, Q4_F32, Q8_16 = range(7)  # as in packed.h


def check_sizes(hidden_size: int, head_dim: int, ffn_size: int, block_size: int) -> None:
    """Raises `Unavailable` for sizes that the kernels do not serve."""
    if hidden_size % 8 or head_dim % 8 or ffn_size % 8:
        raise Unavailable("the C kernels need hidden, head and feed-forward sizes that are multiples of 8")
    if block_size % PAGE:
        raise Unavailable(f"the C kernels need KV blocks of a multiple of {PAGE} tokens")


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """`record` is what C is given; its segments point into `tensors`, which are kept alive here."""

    record: Linear
    segments: Any  # an array of Segment
    tensors: list[Tensor]
    out_features: int
    in_features: int


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

    def pack_linear(self, parts: Sequence[Weight], bias: Tensor | None = None) -> PackedLinear:
        in_features = parts[0].shape[1]
        tensors = [] if bias is None else [bias]
        segments: list[Segment] = []
        done = 0
        for kind, run in itertools.groupby(parts, _kind):
            some = list(run)
            out = sum(part.shape[0] for part in some)
            tensors.append(self._pack(kind, some))
            at = None if bias is None else bias.data_ptr() + 4 * done
            segments.append(Segment(tensors[-1].data_ptr(), at, kind, out))
            done += out
        array = (Segment * len(segments))(*segments)
        return PackedLinear(Linear(array, len(segments), in_features, done), array, tensors, done, in_features)

    def _pack(self, kind: int, parts: list[Weight]) -> Tensor:
        """uint8, in the layout of packed.h."""
        rows, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        data = self._memory.zeros(self._library.noria_packed_bytes(kind, rows, in_features))
        first = 0
        for part in parts:
            count = part.shape[0]
            if isinstance(part, GroupedWeight):
                q, scale, minimum = _regrouped(part, kind)
                lowest = None if minimum is None else minimum.data_ptr()
                self._library.noria_pack_groups(
                    kind, q.data_ptr(), scale.data_ptr(), lowest, first, count, in_features, data.data_ptr()
                )
            else:
                floats = as_floats(part).contiguous()
                self._library.noria_pack_floats(kind, floats.data_ptr(), first, count, in_features, data.data_ptr())
            first += count
        return data

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

    def pack_table(self, weight: Weight, head: PackedLinear | None) -> PackedLinear:
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


def _kind(weight: Weight) -> int:
    """How a weight is kept: as its file has it; floats in two bytes where that changes none of them."""
    if isinstance(weight, GroupedWeight):
        if weight.minimum is not None:
            return Q4 if weight.half_scales else Q4_F32
        return Q8 if weight.half_scales and weight.group_size == 32 else Q8_16
    for kind, dtype in ((F16, torch.float16), (BF16, torch.bfloat16)):
        # Some rows at a time: a large table need not be there three times over.
        if all(torch.equal(rows.to(dtype).to(rows.dtype), rows) for rows in torch.split(as_floats(weight), 4096)):
            return kind
    return F32


def _regrouped(weight: GroupedWeight, kind: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The integers, and scales for groups of the kind's size."""
    times = weight.group_size // (16 if kind == Q8_16 else 32)

    def spread(scales: Any) -> Any:
        return scales if scales is None or times == 1 else scales.repeat_interleave(times, dim=1).contiguous()

    return weight.q.contiguous(), spread(weight.scale.contiguous()), spread(weight.minimum)
