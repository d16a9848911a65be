"""Memory for weights: zeros, aligned, apart from one another, and given back."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from noria.kernels.cpu.pages import ALIGNMENT, CHUNK, HUGE, HugePages


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pieces_are_zeros_aligned_and_apart() -> None:
    memory = HugePages()
    pieces = [memory.zeros(size) for size in (1, 100, CHUNK - 200, 5000, CHUNK + 1)]  # the third and last: new chunks
    for number, piece in enumerate(pieces, start=1):
        assert piece.data_ptr() % ALIGNMENT == 0 and piece.dtype is torch.uint8 and not piece.any()
        piece.fill_(number)
    assert [set(piece[:: len(piece) - 1 or 1].tolist()) for piece in pieces] == [{number} for number in range(1, 6)]
    assert [len(piece) for piece in pieces] == [1, 100, CHUNK - 200, 5000, CHUNK + 1]
    assert all(memory.zeros(CHUNK).data_ptr() % HUGE == 0 for _ in range(2))  # each a chunk of its own


def test_what_is_not_written_costs_nothing_and_what_is_not_used_goes_back() -> None:
    memory, before = HugePages(), resident()
    piece = memory.zeros(4 * CHUNK)
    assert resident() - before < CHUNK
    piece.fill_(1)
    assert resident() - before > 3 * CHUNK
    memory.zeros(CHUNK)  # the rest that it keeps is of another chunk now
    del piece
    gc.collect()
    assert resident() - before < CHUNK
