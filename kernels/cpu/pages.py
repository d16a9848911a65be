"""Memory straight from the system: in huge pages, where it has them, for what every step reads from end to end, the
weights; in its ordinary ones, taken as they are used, for KV pools.

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


def zeros_when_read(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], each page of which takes memory from its first use on: a pool of gigabytes delays no start. In
    ordinary pages, since the first use of a huge one would hold up a step. Raises MemoryError."""
    return torch.frombuffer(_mapping(max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]  # keeps the mapping


def _chunk(num_bytes: int) -> Tensor:
    """uint8 [num_bytes or more], whole huge pages."""
    size = -(-num_bytes // HUGE) * HUGE
    mapping = _mapping(size + HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping
    start = -memory.data_ptr() % HUGE
    return memory[start : start + size]


def _mapping(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {error}") from error
