"""Tiles and launch options of the Triton kernels, checked in: nothing is tuned while serving.

Every row was compiled ahead of time and neither spills nor takes too much shared memory; `tests/kernels` holds that.
Knows no kernel and no device but by its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, Phase] = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile is `block_m` queries (times the query heads of a KV head) high and `block_n` keys wide."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Launch options. Fusing multiply and add is said aloud: its default changes between releases of Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def queries_at_once(self, group: int) -> int:
        """Query tokens of a prefill tile whose rows hold `group` heads of each."""
        return self.block_m // group


@dataclass(frozen=True, slots=True)
class LinearTile:
    """`block_m` tokens times `block_n` outputs, `block_k` inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


# (sm, bytes of an element) -> the one tile of `invariant_linear`: as tall as an instruction of sm 9.0's tensor cores,
# so that few decode rows waste little
LINEAR_TABLE: dict[tuple[int, int], LinearTile] = {
    (90, 2): LinearTile(64, 128, 64, 4, 4),
    (80, 2): LinearTile(64, 128, 64, 4, 3),
    (80, 4): LinearTile(32, 64, 32, 4, 3),
}


def linear_tile_for(sm: int, element_size: int) -> LinearTile:
    """Raises ValueError below compute capability 8.0."""
    fitting = [key for key in LINEAR_TABLE if key[0] <= sm and key[1] >= element_size]
    if not fitting:
        raise ValueError(f"the Triton kernels need compute capability 8.0, not {sm / 10:.1f}")
    return LINEAR_TABLE[min(fitting, key=lambda key: (key[1], -key[0]))]


# (sm, head size up to, query heads of a KV head up to, phase) -> tile, for elements of 16 bits
TABLE: dict[tuple[int, int, int, Phase], Tile] = {
    (90, 64, 16, "decode"): Tile(16, 64, 4, 3),
    (90, 64, 64, "decode"): Tile(64, 64, 4, 3),
    (90, 64, 64, "prefill"): Tile(128, 64, 8, 3),
    (90, 128, 16, "decode"): Tile(16, 64, 4, 3),
    (90, 128, 64, "decode"): Tile(64, 64, 4, 3),
    (90, 128, 64, "prefill"): Tile(128, 64, 8, 3),
    (90, 256, 16, "decode"): Tile(16, 32, 4, 3),
    (90, 256, 16, "prefill"): Tile(64, 64, 8, 2),
    (80, 64, 16, "decode"): Tile(16, 64, 4, 3),
    (80, 64, 64, "decode"): Tile(64, 64, 4, 3),
    (80, 64, 64, "prefill"): Tile(128, 64, 8, 3),
    (80, 128, 16, "decode"): Tile(16, 64, 4, 3),
    (80, 128, 64, "decode"): Tile(64, 64, 8, 3),
    (80, 128, 64, "prefill"): Tile(128, 64, 8, 3),
    (80, 256, 16, "decode"): Tile(16, 32, 4, 3),
    (80, 256, 16, "prefill"): Tile(64, 32, 8, 2),
}

# The same where keys and values are 8-bit floats, which 8.9 is the first to convert; queries have 16 bits. Where a tile
# spilled while it widened, another one is named.
FLOAT8_TABLE: dict[tuple[int, int, int, Phase], Tile] = {
    **{(max(sm, 89), width, group, phase): tile for (sm, width, group, phase), tile in TABLE.items()},
    (90, 64, 16, "decode"): Tile(16, 128, 4, 3),
    (90, 256, 16, "decode"): Tile(16, 32, 4, 2),
    (89, 128, 64, "prefill"): Tile(128, 32, 8, 3),
}

# The same for elements of 32 bits: for tests and for models that need them, not for speed.
WIDE_TABLE: dict[tuple[int, int, int, Phase], Tile] = {
    (80, 128, 16, "decode"): Tile(16, 32, 4, 2),
    (80, 128, 32, "decode"): Tile(32, 32, 8, 2),
    (80, 128, 32, "prefill"): Tile(32, 32, 8, 2),
}


def tile_for(sm: int, head_dim: int, group: int, phase: Phase, element_size: int, kept_size: int = 2) -> Tile:
    """The tile for compute capability `sm` (90 for 9.0), `group` query heads of a KV head, elements of `element_size`
    bytes, keys and values of `kept_size`. A device between two of the table takes the older one's. Raises ValueError
    where no row fits."""
    table = WIDE_TABLE if element_size > 2 else FLOAT8_TABLE if kept_size == 1 else TABLE
    fitting = [key for key in table if key[0] <= sm and key[1] >= head_dim and key[2] >= group and key[3] == phase]
    if not fitting:
        raise ValueError(
            f"the Triton kernels have no tile for compute capability {sm / 10:.1f}, heads of {head_dim} and "
            f"{group} query heads to a KV head: they need 8.0, at most 128 and at most 64 (32 in float32), or at most "
            f"256 and at most 16 (not in float32)"
        )
    return table[min(fitting, key=lambda key: (-key[0], key[1], key[2]))]
