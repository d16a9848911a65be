"""A plan for one iteration: which requests step, and with how many tokens each.

Integers only; execution turns it into tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from noria.engine.scheduling.request import Request


class BatchRow(NamedTuple):
    """Tokens `start` to `start + num_tokens` of one request, the last of them guessed where there is a `draft`. A
    tuple, since one is made per row and iteration."""

    request: Request
    start: int
    num_tokens: int
    is_decode: bool
    samples: bool  # the row reaches the last known token, so its logits choose the next one
    is_padding: bool = False  # a finished row of a static batch, computed and thrown away
    draft: tuple[int, ...] = ()  # of a decode row: tokens guessed to follow the newest one

    @property
    def phase(self) -> Literal["p", "d", "-"]:
        """Prefill, decode or padding, as pictures of iterations name it."""
        return "-" if self.is_padding else "d" if self.is_decode else "p"


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of one iteration, decode rows first."""

    rows: tuple[BatchRow, ...]

    @property
    def num_decode_rows(self) -> int:
        return sum(row.is_decode for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the rows that read."""
        return sum(row.num_tokens for row in self.rows if not row.is_decode)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class Progress(NamedTuple):
    """What an iteration changed for one request. `finish` is set once in a request's life."""

    request: Request
    new_tokens: tuple[int, ...]
    finish: str | None
