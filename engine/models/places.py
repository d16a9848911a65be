"""Where a tensor of the model lies in a file of another layout: under which name, and which of its rows.

Knows no file and no family: the tables of both kinds of checkpoint are made of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a file, or some of its rows. A tensor of more than two dimensions counts as one of two, its last one
    being the columns."""

    name: str
    first: int = 0
    count: int = 0  # 0: all rows
    pick: Callable[[Tensor], Tensor] | None = None  # other rows than `count` in a run, out of the whole tensor
    order: Callable[[Tensor], Tensor] | None = None  # of the rows within each head
    is_transposed: bool = False  # the file has columns for rows
    added: float = 0.0  # to each value: norms whose file holds what is over 1

    def rows(self, wanted: slice, num_rows: int) -> slice:
        """Where the `wanted` rows of the model's tensor are among the `num_rows` of the file's. ValueError where it is
        too short."""
        count = self.count or num_rows
        if self.first + count > num_rows:
            raise ValueError(f"rows {self.first} to {self.first + count} of {num_rows}")
        start, stop, _ = wanted.indices(count)
        return slice(self.first + start, self.first + stop)
