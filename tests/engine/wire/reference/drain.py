"""How fast a pool is worked off, from which waiting times are reckoned. Knows numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Drain:
    """How fast the queue is worked off: `at` is when counting began (0: nothing runs), `rate` in tokens a second."""

    at: int = 0
    tokens: int = 0
    rate: float | None = None

    def note(self, now: int, tokens: int) -> None:
        """So many were finished. A measurement takes half a second at least; older ones fade within ten."""
        if self.at == 0:
            self.at, self.tokens = now, 0
            return
        self.tokens += tokens
        if now - self.at >= 500 and tokens:
            measured = self.tokens * 1000 / (now - self.at)
            old = measured if self.rate is None else self.rate
            self.rate = old + (1 - math.exp((self.at - now) / 10_000)) * (measured - old)
            self.at, self.tokens = now, 0
