"""Weights as files hold them: plain floats, or small integers in groups that share a scale; or rounded
to 8-bit floats.

Knows no file format and no layout of any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [O, C] = scale * q + minimum, G = C / group size scales to a row.

    With minima q are 0 .. 15, without them signed bytes. `half_scales`: every scale and minimum is a half-precision
    number to begin with, so that keeping them as halves loses nothing.
    """

    q: Tensor  # uint8 or int8 [O, C]
    scale: Tensor  # float32 [O, G]
    minimum: Tensor | None  # float32 [O, G]
    half_scales: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.scale.shape[1]

    def floats(self) -> Tensor:
        """The values: float32 [O, C]."""
        values = self.q.float().view(*self.scale.shape, -1) * self.scale[..., None]
        if self.minimum is not None:
            values += self.minimum[..., None]
        return values.view(self.q.shape)

    def rows(self, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
        """The weight with its rows put in another order by `change`, which is given tensors [O, ...]."""
        minimum = None if self.minimum is None else change(self.minimum).contiguous()
        return GroupedWeight(change(self.q).contiguous(), change(self.scale).contiguous(), minimum, self.half_scales)

    def columns(self, start: int, stop: int) -> GroupedWeight:
        """Columns `start` to `stop` alone. Raises ValueError where that cuts a group."""
        size = self.group_size
        if (start, stop) == (0, self.q.shape[1]):
            return self
        if start % size or stop % size:
            raise ValueError(f"columns {start} to {stop} cut its groups of {size}")
        groups = slice(start // size, stop // size)
        minimum = None if self.minimum is None else self.minimum[:, groups].contiguous()
        q, scale = self.q[:, start:stop].contiguous(), self.scale[:, groups].contiguous()
        return GroupedWeight(q, scale, minimum, self.half_scales)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A weight [O, C] whose numbers are 8-bit floats times a scale of their row."""

    values: Tensor  # float8_e4m3fn [O, C]
    scale: Tensor  # float32 [O, 1]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def floats(self) -> Tensor:
        """The values: float32 [O, C]."""
        return self.values.float() * self.scale

    def rows(self, change: Callable[[Tensor], Tensor]) -> Float8Weight:
        """See `GroupedWeight.rows`."""
        moved = change(self.values.view(torch.uint8)).contiguous()  # few operations move 8-bit floats
        return Float8Weight(moved.view(self.values.dtype), change(self.scale).contiguous())


Weight = Tensor | GroupedWeight | Float8Weight


@dataclass(frozen=True, slots=True)
class StreamedWeight:
    """A weight [O, C] that is read some rows at a time: all of it need not be in memory beside what is made of it."""

    shape: tuple[int, ...]
    first: Weight  # its first rows, and of what kind the others are
    rest: Callable[[], Iterator[Weight]]  # the others, at each call read anew


Part = Weight | StreamedWeight


def pieces(*parts: Part) -> Iterator[Weight]:
    """The rows of the weights, in order: of each all at once where it was not streamed."""
    for part in parts:
        if isinstance(part, StreamedWeight):
            yield part.first
            yield from part.rest()
        else:
            yield part


def as_floats(weight: Weight) -> Tensor:
    """float32 [O, C], whatever the weight was."""
    return weight.to(torch.float32) if isinstance(weight, Tensor) else weight.floats()


def stacked_floats(parts: Sequence[Part]) -> Tensor:
    """float32 [O, C]: the parts one below the other, in memory of their own."""
    stacked = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1])
    first = 0
    for piece in pieces(*parts):
        stacked[first : first + piece.shape[0]] = as_floats(piece)
        first += piece.shape[0]
    return stacked
