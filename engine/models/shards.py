"""A rank's part of a checkpoint, as a checkpoint of its own: a smaller model, read piece by piece from the whole one.

Megatron's cuts: projections into heads and into the feed-forward layer by rows, those out of them by columns, tables
by the vocabulary. Knows tensors' names and no file format; what sums the parts is `sharded_ops`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noria.engine.models.build import Checkpoint
from noria.engine.models.errors import ModelError
from noria.engine.models.spec import ModelSpec
from noria.engine.parallel import Indivisible, Parallel, head_shares, share, stage_layers
from noria.kernels.weights import Weight

GROUP = 32
"""Channels that share a scale in most quantised weights: feed-forward channels are divided in whole groups."""

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")
_BY_ROWS = {"q_proj": "queries", "k_proj": "keys", "v_proj": "keys", "gate_proj": "ffn", "up_proj": "ffn"}
_BY_COLUMNS = {"o_proj": "queries", "down_proj": "ffn"}
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Shares:
    """What one rank has of a model. Ranges count in the whole model; `queries` and `keys` are channels."""

    layers: range
    heads: range
    kv_heads: range
    ffn: range
    expert: range  # of each expert's feed-forward channels
    vocab: range

    @staticmethod
    def of(spec: ModelSpec, parallel: Parallel) -> Shares:
        """Raises ModelError where the model cannot be divided so."""
        tp, shard = parallel.tp, parallel.shard
        layer = 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
        layer += 3 * spec.hidden_size * spec.ffn_size
        if tp > 1 and spec.head_norm == "width":
            raise ModelError(f"--tp {tp} does not fit this model: its norms go over the heads of all ranks")
        try:
            heads, kv_heads = head_shares(spec.num_heads, spec.num_kv_heads, tp, shard)
            return Shares(
                stage_layers(spec.num_layers, parallel.pp, parallel.stage, spec.vocab_size * spec.hidden_size / layer),
                heads,
                kv_heads,
                _channels(spec.ffn_size, tp, shard),
                _channels(spec.experts.ffn_size, tp, shard) if spec.experts else range(0),
                share(spec.vocab_size, tp, shard),
            )
        except Indivisible as error:
            raise ModelError(f"--tp {tp} --pp {parallel.pp} does not fit this model: {error}") from None

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """The rank's part as a model."""
        return replace(
            whole,
            layers=whole.layers[self.layers.start : self.layers.stop],
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            ffn_size=len(self.ffn),
            vocab_size=len(self.vocab),
            experts=replace(whole.experts, ffn_size=len(self.expert)) if whole.experts else None,
        )


class ShardedCheckpoint:
    """See `build.Checkpoint`. Layers are counted from the rank's first one."""

    def __init__(self, whole: Checkpoint, parallel: Parallel) -> None:
        self.label = whole.label
        self._whole = whole
        self._parallel = parallel
        spec = whole.spec()
        self._shares = shares = Shares.of(spec, parallel)
        self._spec = shares.spec(spec)
        dim = spec.head_dim
        self._channels = {
            "queries": slice(shares.heads.start * dim, shares.heads.stop * dim),
            "keys": slice(shares.kv_heads.start * dim, shares.kv_heads.stop * dim),
            "ffn": slice(shares.ffn.start, shares.ffn.stop),
            "expert": slice(shares.expert.start, shares.expert.stop),
        }
        self._fractions = {
            "queries": len(shares.heads) / spec.num_heads,
            "keys": len(shares.kv_heads) / spec.num_kv_heads,
            "ffn": len(shares.ffn) / spec.ffn_size,
            "expert": len(shares.expert) / spec.experts.ffn_size if spec.experts else 0.0,
        }
        self._of_vocab = len(shares.vocab) / spec.vocab_size

    def spec(self) -> ModelSpec:
        return self._spec

    def num_bytes(self, name: str) -> int:
        by = _cut_by(name, _BY_ROWS) or _cut_by(name, _BY_COLUMNS)
        fraction = self._of_vocab if name in _TABLES else self._fractions[by] if by else 1.0
        return round(self._whole.num_bytes(self._name(name)) * fraction)

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        if name.endswith(".bias") and _part(name) in _BY_COLUMNS:  # added once to a sum over all shards
            whole = self._whole.tensor(self._name(name))
            return whole if self._parallel.shard == 0 else torch.zeros_like(whole)
        return self._whole.tensor(self._name(name), *self._cut(name, rows, columns))

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        return self._whole.weight(self._name(name), *self._cut(name, rows, columns))

    def _cut(self, name: str, rows: slice, columns: slice) -> tuple[slice, slice]:
        """Where rows and columns of the rank's part are in the whole."""
        if name in _TABLES:
            return _within(slice(self._shares.vocab.start, self._shares.vocab.stop), rows), columns
        if by := _cut_by(name, _BY_ROWS):
            return _within(self._channels[by], rows), columns
        if by := _cut_by(name, _BY_COLUMNS):
            return rows, _within(self._channels[by], columns)
        return rows, columns

    def _name(self, name: str) -> str:
        found = _LAYER.fullmatch(name)
        return name if found is None else f"{found[1]}{int(found[2]) + self._shares.layers.start}{found[3]}"


def _cut_by(name: str, table: dict[str, str]) -> str | None:
    """What the tensor is divided by, in the table of its rows or of its columns."""
    by = table.get(_part(name))
    return "expert" if by == "ffn" and ".experts." in name else by


def _within(cut: slice, wanted: slice) -> slice:
    start, stop, _ = wanted.indices(cut.stop - cut.start)
    return slice(cut.start + start, cut.start + stop)


def _channels(count: int, tp: int, shard: int) -> range:
    return share(count, tp, shard, GROUP if count % GROUP == 0 else 1)


def _part(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `up_proj`."""
    return name.rsplit(".", 2)[-2]
