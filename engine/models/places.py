"""Where a tensor of the model lies in a file of another layout: under which name, and which of its rows.

Knows no file and no family: the tables of both kinds of checkpoint are made of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a file, or a part of it. `first` and `count` are rows; a tensor of more than two dimensions counts as
    one of two, its last one being the columns. `order` then picks or orders what was read, along the rows."""

    name: str
    first: int = 0
    count: int = 0  # 0: all rows
    order: Callable[[Tensor], Tensor] | None = None
    is_transposed: bool = False  # the file has columns for rows
    added: float = 0.0  # to each value: norms whose file holds what is over 1

    def part(self, values: Tensor) -> Tensor:
        """The part of the file's whole tensor; nothing is added yet."""
        if self.is_transposed:
            values = values.t()
        if self.count:
            values = values[self.first : self.first + self.count]
        return values if self.order is None else self.order(values)
