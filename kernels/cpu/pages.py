"""Memory in huge pages, where the system has them, for what every step reads from end to end: the weights.

With pages of 4 KiB the walks through the page tables, two of them in a virtual machine, take a tenth of a step of one
row and more. Knows bytes; not what they hold.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 32 << 20
ALIGNMENT = 64
"""Bytes: a line of the cache."""


class HugePages:
    """Hands out memory from chunks, which are freed once nothing of them is used any more."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to `ALIGNMENT`; not touched before it is written. Raises MemoryError."""
        if num_bytes > len(self._rest):
            self._rest = _chunk(max(num_bytes, CHUNK))
        taken, self._rest = self._rest[:num_bytes], self._rest[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return taken


def _chunk(num_bytes: int) -> Tensor:
    """uint8 [num_bytes or more], whole huge pages."""
    size = -(-num_bytes // HUGE) * HUGE
    try:
        mapping = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes cannot be had: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping
    start = -memory.data_ptr() % HUGE
    return memory[start : start + size]
