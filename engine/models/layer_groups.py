"""Puts the layers of a model in groups that share the KV cache's blocks: those of one group see equally far back.

Knows a model's shape; no blocks' numbers and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from noria.engine.models.spec import ModelSpec

MAX_GROUPS = 8
"""A block table and a plan of each step's attention are made for every group."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """`windows`: tokens that the layers of each group see; 0: all. `of_layer`: the group of each layer.

    A block holds keys and values of one page for one layer of the largest group after the other, `depth` in all, so
    groups of other sizes leave some of it unused.
    """

    windows: tuple[int, ...]
    of_layer: tuple[int, ...]

    @property
    def depth(self) -> int:
        return max(self.of_layer.count(group) for group in range(len(self.windows)))

    def part(self, layers: range) -> LayerGroups:
        """Of a stage that has these layers. Its blocks are those of all, each with room for the stage's own layers."""
        return LayerGroups(self.windows, self.of_layer[layers.start : layers.stop])

    @property
    def places(self) -> tuple[int, ...]:
        """Where in its group's blocks each layer is."""
        return tuple(self.of_layer[:layer].count(group) for layer, group in enumerate(self.of_layer))


def group_layers(spec: ModelSpec) -> LayerGroups:
    """Groups so large that a text as long as the model takes is held in the fewest bytes. The layers that see equally
    far are dealt out to their groups one by one, so that every part of the stack has its share of each."""
    windows = [layer.window if layer.window < spec.max_len else 0 for layer in spec.layers]
    if len(set(windows)) > MAX_GROUPS:  # no model is like this
        windows = [0] * spec.num_layers
    counts = {window: windows.count(window) for window in sorted(set(windows))}

    def num_groups(depth: int) -> dict[int, int]:
        return {window: -(-count // depth) for window, count in counts.items()}

    def cost(depth: int) -> int:
        kept = sum(groups * (window or spec.max_len) for window, groups in num_groups(depth).items())
        return depth * kept

    depths = [depth for depth in range(1, spec.num_layers + 1) if sum(num_groups(depth).values()) <= MAX_GROUPS]
    chosen = num_groups(min(depths, key=lambda depth: (cost(depth), -depth)))
    first = {window: sum(groups for w, groups in chosen.items() if w < window) for window in counts}
    of_layer = tuple(
        first[window] + windows[:index].count(window) % chosen[window] for index, window in enumerate(windows)
    )
    return LayerGroups(tuple(window for window, groups in chosen.items() for _ in range(groups)), of_layer)
