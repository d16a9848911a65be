"""Chooses what computes on this machine: plain torch (`torch_ops.py`) runs everywhere, the C library
(`cpu/native_ops.py`) on CPUs with AVX2.

Knows no requests or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from noria.kernels.cpu import library, native_ops
from noria.kernels.cpu.native_ops import NativeOps
from noria.kernels.ops import Ops
from noria.kernels.torch_ops import TorchOps

KINDS = ("auto", "native", "torch")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a backend must be able to hold: see `native_ops.check_sizes`."""

    hidden_size: int
    head_dim: int
    ffn_size: int
    block_size: int


def choose(kind: str, sizes: Sizes, threads: int, note: Callable[[str], None] | None = None) -> Ops:
    """The backend named by `kind`; "auto" is the C library where it can be had and serves such sizes, else torch, and
    `note` is told why. Raises ValueError where "native" cannot be had."""
    if kind not in KINDS:
        raise ValueError(f"kernels {kind!r} are not known: {', '.join(KINDS)}")
    if kind != "torch":
        try:
            native_ops.check_sizes(sizes.hidden_size, sizes.head_dim, sizes.ffn_size, sizes.block_size)
            return NativeOps(library.load(), threads)
        except library.Unavailable as error:
            if kind == "native":
                raise ValueError(f"native kernels cannot be had: {error}") from error
            if note is not None:
                note(str(error))
    return TorchOps()
