"""The operations on a GPU: attention, norms, rotations and gates in Triton, products by torch.

Moves what a step needs to the device in one piece and picks tiles. Knows no requests or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from noria.kernels import elementwise, float8
from noria.kernels.compiles import Compiles
from noria.kernels.configs import PHASES, Tile, linear_tile_for, tile_for
from noria.kernels.decode_buffers import DecodeBuffers
from noria.kernels.invariant_linear import invariant_linear
from noria.kernels.layers import LayerWeights
from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import Scores
from noria.kernels.pools import KVPools
from noria.kernels.ragged_decode import DecodeRows, decode_attention
from noria.kernels.ragged_prefill import PrefillRows, prefill_attention, prefill_tiles
from noria.kernels.transfer import to_device
from noria.kernels.weights import Float8Weight, Part, as_floats, pieces

ROPE_KINDS = 4
"""Tables of angles that stay on the device: more than a model has."""

INTERPRETED_SM = 90  # whose tiles are taken where there is no GPU and Triton interprets


@dataclass(frozen=True, slots=True)
class PackedLinear:
    weight: Tensor  # [O, C]
    bias: Tensor | None  # [O]
    scale: Tensor | None = None  # float32 [1, O], where the weight is 8-bit floats


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all layers of a step share, on the device."""

    decode: DecodeRows | None
    decode_tile: Tile
    prefill: PrefillRows | None
    prefill_tile: Tile
    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]
    angles: Tensor  # float32 [positions, D]
    scores: Scores


class TritonOps:
    """See `ops.Ops`. Weights and activations have `dtype`; pools are [num_blocks, block_size, Hk, D]. Where it is
    `deterministic`, linears have the same bits in any batch too, at the price of speed; all else always has.

    On the CPU it runs in Triton's interpreter alone, and in float32: for tests.
    """

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype, *, deterministic: bool = False) -> None:
        self.device = device
        self.deterministic = deterministic
        self.compiles = Compiles()
        triton.knobs.runtime.jit_cache_hook = self.compiles.hook(triton.knobs.runtime.jit_cache_hook)
        self.dtype = dtype
        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else divmod(INTERPRETED_SM, 10)
        self._sm = 10 * major + minor
        on_gpu = device.type == "cuda"
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        self._angles: list[tuple[Tensor, Tensor]] = []  # those that were moved last, and what they are on the device

    def check_heads(self, head_dim: int, group: int) -> None:
        """Raises ValueError for heads that no tile serves; `group` is query heads to a KV head."""
        for phase in ("decode", "prefill"):
            tile_for(self._sm, head_dim, group, phase, self.dtype.itemsize)

    # --- weights --------------------------------------------------------------------------------------------------

    def pack_linear(self, parts: Sequence[Part], bias: Tensor | None = None) -> PackedLinear:
        bias = None if bias is None else bias.to(self.device, self.dtype)
        if all(isinstance(next(pieces(part)), Float8Weight) for part in parts):
            rounded = [piece for piece in pieces(*parts) if isinstance(piece, Float8Weight)]
            values = torch.cat([part.values.view(torch.uint8) for part in rounded]).view(float8.DTYPE)
            scale = torch.cat([part.scale for part in rounded]).t().contiguous()
            return PackedLinear(values.to(self.device), bias, scale.to(self.device))
        return PackedLinear(self._stacked(parts), bias)

    def linear(self, x: Tensor, packed: PackedLinear, add_to: Tensor | None = None) -> Tensor:
        if packed.scale is not None:
            product = float8.float8_linear(x, packed.weight, packed.scale, packed.bias)
        elif self.deterministic:
            tile = linear_tile_for(self._sm, self.dtype.itemsize)
            product = invariant_linear(x, packed.weight, packed.bias, tile, self._programs)
        else:
            product = F.linear(x, packed.weight, packed.bias)
        return product if add_to is None else add_to.add_(product)

    def pack_norm(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype)

    def pack_table(self, weight: Part, head: PackedLinear | None) -> Tensor:
        return head.weight if head is not None else self._stacked([weight])

    def _stacked(self, parts: Sequence[Part]) -> Tensor:
        return torch.cat([as_floats(piece).to(self.device, self.dtype) for piece in pieces(*parts)])

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(to_device(ids, self.device), table)

    # --- attention ------------------------------------------------------------------------------------------------

    def new_kv_pools(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVPools:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(num_layers)] for _ in range(2)
        )
        return KVPools(keys, values, block_size, num_kv_heads, head_dim)

    def plan_step(
        self, layout: RaggedLayout, positions: Tensor, angles: Tensor, kv: KVPools, num_heads: int, scores: Scores
    ) -> StepPlan:
        group = num_heads // kv.num_kv_heads
        decode_tile, prefill_tile = self._tiles(kv, group)
        lengths, starts = layout.kv_lens.tolist(), layout.query_start.tolist()
        cut = prefill_tiles(starts, lengths, layout.decode_rows, prefill_tile.queries_at_once(group))
        query_start, kv_lens, table, tiles, slots, places = self._moved(
            layout.query_start,
            layout.kv_lens,
            layout.block_table,
            torch.tensor(cut, dtype=torch.int32).view(-1, 2),
            layout.slot_mapping,
            positions,
        )
        decode = None
        if layout.decode_rows:
            longest = max(lengths[: layout.decode_rows])
            decode = DecodeRows.build(layout.decode_rows, table, kv_lens, longest, (num_heads, kv.head_dim))
        prefill = PrefillRows(table, query_start, kv_lens, tiles) if cut else None
        return StepPlan(decode, decode_tile, prefill, prefill_tile, places, slots, self._angles_here(angles), scores)

    def plan_decode(
        self, rows: DecodeBuffers, group: int, angles: Tensor, kv: KVPools, num_heads: int, scores: Scores
    ) -> StepPlan:
        """See `DecodePlanner`."""
        shape = (num_heads, kv.head_dim)
        tiles = self._tiles(kv, num_heads // kv.num_kv_heads)
        decode = DecodeRows.build(rows.num_rows, rows.tables[group], rows.kv_lens, rows.longest, shape)
        here = self._angles_here(angles)
        return StepPlan(decode, tiles[0], None, tiles[1], rows.positions, rows.slots[group], here, scores)

    def _tiles(self, kv: KVPools, group: int) -> list[Tile]:
        """In the order of PHASES."""
        sizes = self.dtype.itemsize, kv.keys[0].dtype.itemsize
        return [tile_for(self._sm, kv.head_dim, group, phase, *sizes) for phase in PHASES]

    def _angles_here(self, angles: Tensor) -> Tensor:
        """A model has one table, or one for each kind of rope; they change when they grow."""
        for known, moved in self._angles:
            if known is angles:
                return moved
        self._angles = [*self._angles[-(ROPE_KINDS - 1) :], (angles, angles.to(self.device))]
        return self._angles[-1][1]

    def _moved(self, *parts: Tensor) -> list[Tensor]:
        """Integers as int32 on the device, in one transfer. Each part begins at a multiple of 16 bytes: compiled
        kernels are for pointers that do, and others would be compiled anew."""
        sizes = [-(-part.numel() // 4) * 4 for part in parts]
        whole = torch.zeros(sum(sizes), dtype=torch.int32)
        for place, part in zip(whole.split_with_sizes(sizes), parts, strict=True):
            place[: part.numel()] = part.flatten()
        moved = to_device(whole, self.device).split_with_sizes(sizes)
        return [place[: part.numel()].view(part.shape) for place, part in zip(moved, parts, strict=True)]

    def rope_write_kv(self, qkv: Tensor, kv: KVPools, layer: int, plan: StepPlan) -> Tensor:
        return elementwise.rope_write_kv(qkv, plan.angles, plan.positions, plan.slots, kv.keys[layer], kv.values[layer])

    def ragged_attention(self, q: Tensor, kv: KVPools, layer: int, plan: StepPlan) -> Tensor:
        out, pools = torch.empty_like(q), (kv.keys[layer], kv.values[layer])
        scale, window, softcap = plan.scores.scale, plan.scores.window, plan.scores.softcap
        if plan.decode is not None:
            decode_attention(q, *pools, plan.decode, out, scale, plan.decode_tile, window=window, softcap=softcap)
        if plan.prefill is not None:
            prefill_attention(q, *pools, plan.prefill, out, scale, plan.prefill_tile, window=window, softcap=softcap)
        return out.flatten(1)

    # --- per token ------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    # --- the stack ------------------------------------------------------------------------------------------------

    def pack_layers(self, layers: Sequence[LayerWeights]) -> list[LayerWeights]:
        return list(layers)

    def pack_low_ranks(self, pairs: Mapping[Any, Any], num_layers: int) -> None:
        return None

    def run_layers(
        self,
        x: Tensor,
        layers: list[LayerWeights],
        eps: float,
        kv: KVPools,
        plan: StepPlan,
        adapted: Sequence[Any] = (),
    ) -> Tensor:
        """What a layer adds to x is added where the next norm reads x."""
        delta: Tensor | None = None
        for index, layer in enumerate(layers):
            assert layer.attention_norm is not None and layer.ffn_norm is not None
            qkv = self.linear(elementwise.rms_norm(x, layer.attention_norm.weight, eps, delta), layer.qkv)
            queries = self.rope_write_kv(qkv, kv, index, plan)
            delta = self.linear(self.ragged_attention(queries, kv, index, plan), layer.output)
            gate_up = self.linear(elementwise.rms_norm(x, layer.ffn_norm.weight, eps, delta), layer.gate_up)
            delta = self.linear(self.silu_mul(gate_up), layer.down)
        return x if delta is None else x.add_(delta)
