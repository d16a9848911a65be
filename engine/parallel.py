"""Which share of a model a rank has: a stage of its layers (pp), and of each of these a shard (tp).

Arithmetic on integers, passed as an argument and never global. Knows no model, no tensor, no transport.
"""

from __future__ import annotations

from dataclasses import dataclass


class Indivisible(ValueError):
    """What was asked for cannot be divided among so many ranks; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """One of tp x pp ranks. Those of a stage are neighbours: rank = stage * tp + shard."""

    rank: int = 0
    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.pp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def shard(self) -> int:
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        """Whether its stage reads token ids."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage gives logits."""
        return self.stage == self.pp - 1

    @property
    def samples(self) -> bool:
        """Whether it is the one rank that chooses tokens."""
        return self.rank == self.sampling_rank

    @property
    def sampling_rank(self) -> int:
        return (self.pp - 1) * self.tp


WHOLE = Parallel()
"""One rank that has all of the model."""


def share(count: int, parts: int, index: int, unit: int = 1) -> range:
    """The part `index` of `count` things in whole units, as even as can be, the larger parts first. Raises Indivisible
    where a part would be empty or a unit cut."""
    units, rest = divmod(count, unit)
    if rest or units < parts:
        raise Indivisible(f"{count} in units of {unit} cannot be divided by {parts}")
    each, more = divmod(units, parts)
    start = index * each + min(index, more)
    return range(start * unit, (start + each + (index < more)) * unit)


def stage_layers(num_layers: int, pp: int, stage: int, head_layers: float = 0.0) -> range:
    """A stage's layers. The last stage computes the output head too, which costs as much as `head_layers` layers, so
    it gets fewer. Raises Indivisible where a stage would have none."""
    if pp > num_layers:
        raise Indivisible(f"{num_layers} layers cannot be divided into {pp} stages")
    last = max(1, min(num_layers - pp + 1, round((num_layers + head_layers) / pp - head_layers)))
    if stage == pp - 1:
        return range(num_layers - last, num_layers)
    return share(num_layers - last, pp - 1, stage)


def head_shares(num_heads: int, num_kv_heads: int, tp: int, shard: int) -> tuple[range, range]:
    """Query heads and KV heads of a shard. KV heads are divided with the queries that read them; where there are fewer
    than shards, several shards hold the same one. Raises Indivisible."""
    if tp <= num_kv_heads:
        kv = share(num_kv_heads, tp, shard)
        group = num_heads // num_kv_heads
        return range(kv.start * group, kv.stop * group), kv
    if tp % num_kv_heads or num_heads % tp:
        raise Indivisible(f"{num_heads} heads over {num_kv_heads} KV heads cannot be divided by {tp}")
    kept = shard * num_kv_heads // tp
    return share(num_heads, tp, shard), range(kept, kept + 1)
