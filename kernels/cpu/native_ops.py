"""The operations on the C library: exact weights in their files' own precision, float32 arithmetic, and the same bits
for a token whoever its batch mates are and however it is computed.

Hands addresses to C and shapes nothing else. Knows no requests or models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noria.kernels.cpu.library import Unavailable
from noria.kernels.layout import RaggedLayout
from noria.kernels.pools import KVPools
from noria.kernels.weights import GroupedWeight, Weight

PAGE = 16
"""Tokens of a page; a KV block is one or several."""

QUERIES_AT_ONCE = 16
"""Queries of a prompt in one piece of work: enough that keys are read seldom, few enough to spread over threads."""

F32, F16, Q4, Q8, Q4_F32, Q8_16 = range(6)  # as in linear.c


def check_sizes(hidden_size: int, head_dim: int, ffn_size: int, block_size: int) -> None:
    """Raises `Unavailable` for sizes that the kernels do not serve."""
    if hidden_size % 8 or head_dim % 8 or ffn_size % 8:
        raise Unavailable("the C kernels need hidden, head and feed-forward sizes that are multiples of 8")
    if block_size % PAGE:
        raise Unavailable(f"the C kernels need KV blocks of a multiple of {PAGE} tokens")


@dataclass(frozen=True, slots=True)
class Segment:
    """Outputs that share a kind of weight; `data` is kept alive by its tensor."""

    kind: int
    data: Tensor  # uint8
    out_features: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    segments: list[Segment]
    bias: Tensor | None  # [O]
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`calls` are the arguments that all layers share, as C takes them; the tensors behind them are held as well."""

    layout: RaggedLayout
    pages: Tensor  # int32 [R, pages of the longest row]
    tasks: Tensor  # int32 [N, 3]: row, first query, end
    positions: Tensor  # int64 [T]
    angles: Tensor  # float32 [positions, D]
    longest: int
    scale: float


class NativeOps:
    """See `ops.Ops`. Pools are [pages, Hk, D, 16] for keys and [pages, Hk, 16, D] for values."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._scratch = torch.empty(0)

    # --- weights --------------------------------------------------------------------------------------------------

    def pack_linear(self, parts: Sequence[Weight], bias: Tensor | None = None) -> PackedLinear:
        in_features = parts[0].shape[1]
        segments: list[Segment] = []
        run: list[Weight] = []
        kinds = [_kind(part) for part in parts]
        for place, part in enumerate(parts):
            run.append(part)
            if place + 1 == len(parts) or kinds[place + 1] != kinds[place]:
                segments.append(self._pack(kinds[place], run))
                run = []
        return PackedLinear(segments, bias, sum(part.shape[0] for part in parts), in_features)

    def _pack(self, kind: int, parts: list[Weight]) -> Segment:
        rows, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        data = torch.zeros(self._library.noria_packed_bytes(kind, rows, in_features), dtype=torch.uint8)
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
                floats = part.to(torch.float32).contiguous()
                self._library.noria_pack_floats(kind, floats.data_ptr(), first, count, in_features, data.data_ptr())
            first += count
        return Segment(kind, data, rows)

    def linear(self, x: Tensor, packed: PackedLinear, add_to: Tensor | None = None) -> Tensor:
        rows, width = len(x), packed.out_features
        out = torch.empty(rows, width) if add_to is None else add_to
        if rows == 0:
            return out
        needed = rows * packed.in_features // 32
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed)
        to, bias = out.data_ptr(), None if packed.bias is None else packed.bias.data_ptr()
        for segment in packed.segments:
            self._library.noria_linear(
                segment.kind,
                segment.data.data_ptr(),
                bias,
                segment.out_features,
                packed.in_features,
                x.data_ptr(),
                x.stride(0),
                rows,
                to,
                width,
                add_to is not None,
                self._scratch.data_ptr(),
                self._threads,
            )
            to += 4 * segment.out_features
            bias = None if bias is None else bias + 4 * segment.out_features
        return out

    def pack_table(self, weight: Weight, head: PackedLinear | None) -> PackedLinear:
        return head if head is not None else self.pack_linear([weight])

    def embed(self, table: PackedLinear, ids: Tensor) -> Tensor:
        (segment,) = table.segments
        out = torch.empty(len(ids), table.in_features)
        self._library.noria_rows(
            segment.kind, segment.data.data_ptr(), table.in_features, ids.data_ptr(), len(ids), out.data_ptr()
        )
        return out

    # --- attention ------------------------------------------------------------------------------------------------

    def new_kv_pools(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVPools:
        pages = num_blocks * block_size // PAGE
        return KVPools(
            keys=[torch.zeros(pages, num_kv_heads, head_dim, PAGE, dtype=dtype) for _ in range(num_layers)],
            values=[torch.zeros(pages, num_kv_heads, PAGE, head_dim, dtype=dtype) for _ in range(num_layers)],
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def plan_step(self, layout: RaggedLayout, positions: Tensor, angles: Tensor, kv: KVPools, scale: float) -> StepPlan:
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
        return StepPlan(
            layout=layout,
            pages=pages.contiguous(),
            tasks=torch.tensor([task[1:] for task in tasks], dtype=torch.int32),
            positions=positions,
            angles=angles,
            longest=max(lengths, default=0),
            scale=scale,
        )

    def rope_write_kv(self, qkv: Tensor, kv: KVPools, layer: int, plan: StepPlan) -> Tensor:
        dim = kv.head_dim
        num_heads = qkv.shape[1] // dim - 2 * kv.num_kv_heads
        keys, values = kv.keys[layer], kv.values[layer]
        self._library.noria_rope_write_kv(
            qkv.data_ptr(),
            plan.angles.data_ptr(),
            plan.positions.data_ptr(),
            plan.layout.slot_mapping.data_ptr(),
            len(qkv),
            num_heads,
            kv.num_kv_heads,
            dim,
            dim,
            keys.data_ptr(),
            values.data_ptr(),
            keys.dtype == torch.float16,
            self._threads,
        )
        return qkv.view(len(qkv), -1, dim)[:, :num_heads]

    def ragged_attention(self, q: Tensor, kv: KVPools, layer: int, plan: StepPlan) -> Tensor:
        num_tokens, num_heads, dim = q.shape
        out = torch.empty(num_tokens, num_heads * dim)
        if num_tokens == 0:
            return out
        keys = kv.keys[layer]
        failed = self._library.noria_attention(
            q.data_ptr(),
            q.stride(0),
            keys.data_ptr(),
            kv.values[layer].data_ptr(),
            keys.dtype == torch.float16,
            plan.layout.query_start.data_ptr(),
            plan.layout.kv_lens.data_ptr(),
            plan.pages.data_ptr(),
            plan.pages.shape[1],
            plan.tasks.data_ptr(),
            len(plan.tasks),
            num_heads,
            kv.num_kv_heads,
            dim,
            plan.scale,
            plan.longest,
            out.data_ptr(),
            self._threads,
        )
        if failed:
            raise MemoryError("no memory for the scores of the attention")
        return out

    # --- per token ------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._library.noria_rms_norm(
            x.data_ptr(), weight.data_ptr(), eps, len(x), x.shape[1], out.data_ptr(), self._threads
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self._library.noria_silu_mul(gate_up.data_ptr(), rows, width, out.data_ptr(), self._threads)
        return out


def _kind(weight: Weight) -> int:
    """How a weight is kept: as its file has it; floats as halves where that changes none of them."""
    if isinstance(weight, GroupedWeight):
        if weight.minimum is not None:
            return Q4 if weight.half_scales else Q4_F32
        return Q8 if weight.half_scales and weight.group_size == 32 else Q8_16
    as_halves = weight.to(torch.float16)
    return F16 if bool((as_halves.to(weight.dtype) == weight).all()) else F32


def _regrouped(weight: GroupedWeight, kind: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The integers, and scales for groups of the kind's size."""
    times = weight.group_size // (16 if kind == Q8_16 else 32)

    def spread(scales: Any) -> Any:
        return scales if scales is None or times == 1 else scales.repeat_interleave(times, dim=1).contiguous()

    return weight.q.contiguous(), spread(weight.scale.contiguous()), spread(weight.minimum)
