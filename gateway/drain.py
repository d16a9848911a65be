"""Whether this process is on its way out, and how many answers it still owes.

Knows no signal and no request.
"""

from __future__ import annotations


class Drain:
    """`begun` is final. `open` counts HTTP requests that are being answered, probes excepted."""

    def __init__(self) -> None:
        self.begun = False
        self.open = 0
