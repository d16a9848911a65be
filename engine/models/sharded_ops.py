"""A backend whose layers are divided over the ranks of a stage (tensor parallelism): the operations of one rank, and
the sums that make their parts whole.

Knows which of a layer's linears give parts of a sum; not where the other ranks are, nor how they are reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from torch import Tensor

from noria.engine.models.decoder import DecoderWeights
from noria.kernels.layers import LayerForm, LayerWeights, run_layers
from noria.kernels.ops import Ops


class Shards(Protocol):
    """The ranks that share a stage, seen from one of them. All must call alike."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, the same bits at each; `part` may be overwritten."""

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The ranks' parts [T, width of the rank] side by side: whole where tokens are chosen; elsewhere nobody may
        look at what is returned."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A packed linear whose inputs are this rank's alone: its outputs are parts of a sum."""

    packed: Any


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A packed table or head of the tokens in `ids`; `widths` are those of all ranks."""

    packed: Any
    ids: range
    widths: tuple[int, ...]


class ShardedOps:
    """See `ops.Ops`: as `inner`, but for what the ranks must do together. Layers are composed of single operations,
    between which they meet."""

    def __init__(self, inner: Ops, shards: Shards) -> None:
        self._inner = inner
        self._shards = shards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def linear(self, x: Tensor, packed: Any, add_to: Tensor | None = None) -> Tensor:
        if isinstance(packed, Vocabulary):
            return self._shards.gather(self._inner.linear(x, packed.packed), packed.widths)
        if not isinstance(packed, Partial):
            return self._inner.linear(x, packed, add_to)
        whole = self._shards.sum(self._inner.linear(x, packed.packed))
        return whole if add_to is None else add_to.add_(whole)

    def embed(self, table: Any, ids: Tensor) -> Tensor:
        if not isinstance(table, Vocabulary):
            return self._inner.embed(table, ids)
        elsewhere = (ids < table.ids.start) | (ids >= table.ids.stop)
        rows = self._inner.embed(table.packed, (ids - table.ids.start).masked_fill_(elsewhere, 0))
        return self._shards.sum(rows.masked_fill_(elsewhere.to(rows.device)[:, None], 0.0))

    def pack_layers(self, layers: Sequence[LayerWeights]) -> list[LayerWeights]:
        return list(layers)

    def pack_low_ranks(self, pairs: Mapping[Any, Any], num_layers: int) -> None:
        return None

    def run_layers(
        self, x: Tensor, layers: Sequence[LayerWeights], eps: float, kv: Any, plan: Any, adapted: Sequence[Any] = ()
    ) -> Tensor:
        return run_layers(cast(Ops, self), x, layers, LayerForm(eps), kv, [plan] * len(layers))


def shard_weights(weights: DecoderWeights, ids: range, widths: tuple[int, ...]) -> DecoderWeights:
    """The weights, marked for `ShardedOps`: what gives parts of a sum, and tables of the tokens in `ids` alone."""

    def part(packed: Any | None) -> Any | None:
        return None if packed is None else Vocabulary(packed, ids, widths)

    layers = [_shard_layer(layer) for layer in weights.layers]
    return replace(weights, embedding=part(weights.embedding), layers=layers, head=part(weights.head))


def _shard_layer(layer: LayerWeights) -> LayerWeights:
    layer = replace(layer, output=Partial(layer.output))
    if layer.experts is None:
        return replace(layer, down=Partial(layer.down))
    networks = [(gate_up, Partial(down)) for gate_up, down in layer.experts.networks]
    return replace(layer, experts=replace(layer.experts, networks=networks))
