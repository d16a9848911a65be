"""Counts the kernels that are compiled while an engine runs: after its warm-up there should be none.

Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Compiles:
    """`num` kernels were compiled, or fetched from the disk, since it was last set to 0."""

    num: int = 0

    def hook(self, before: Any) -> Any:
        """A hook for Triton's cache of kernels that counts, then does what the one `before` it did."""

        def counted(**known: Any) -> Any:
            self.num += 1
            return None if before is None else before(**known)

        return counted
