"""Chooses what computes on this machine: Triton (`triton_ops.py`) on a GPU, the C library (`cpu/native_ops.py`) on CPUs
with AVX2, plain torch (`torch_ops.py`) everywhere.

Knows no requests or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from noria.kernels.cpu import library, native_ops
from noria.kernels.cpu.library import Unavailable
from noria.kernels.cpu.native_ops import NativeOps
from noria.kernels.ops import Ops
from noria.kernels.torch_ops import TorchOps

KINDS = ("auto", "triton", "native", "torch")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a backend must be able to hold: see `native_ops.check_sizes` and `TritonOps.check_heads`."""

    hidden_size: int
    head_dim: int
    ffn_size: int
    block_size: int
    group: int = 1  # query heads to a KV head
    beyond_triton: str = ""  # what the model needs that the Triton kernels have not


@dataclass(frozen=True, slots=True)
class OnGPU:
    """How a GPU computes: see `TritonOps`. CPUs compute in float32."""

    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False


def choose(
    kind: str, sizes: Sizes, threads: int, note: Callable[[str], None] | None = None, on_gpu: OnGPU | None = None
) -> Ops:
    """The backend named by `kind`; "auto" is the first that can be had and serves such sizes: Triton where there is a
    GPU, the C library, torch. `note` is told why one was passed over that should have been there. Raises ValueError
    where one that was named cannot be had."""
    if kind not in KINDS:
        raise ValueError(f"kernels {kind!r} are not known: {', '.join(KINDS)}")
    if kind == "triton" or (kind == "auto" and torch.cuda.is_available()):
        try:
            return _triton(sizes, on_gpu or OnGPU())
        except Unavailable as error:
            _pass_over("triton", kind, error, note)
    if kind != "torch":
        try:
            native_ops.check_sizes(sizes.hidden_size, sizes.head_dim, sizes.ffn_size, sizes.block_size)
            return NativeOps(library.load(), threads)
        except Unavailable as error:
            _pass_over("native", kind, error, note)
    return TorchOps()


def _pass_over(name: str, kind: str, error: Unavailable, note: Callable[[str], None] | None) -> None:
    if kind == name:
        raise ValueError(f"{name} kernels cannot be had: {error}") from error
    if note is not None:
        note(f"no {name} kernels: {error}")


def _triton(sizes: Sizes, on_gpu: OnGPU) -> Ops:
    """Raises Unavailable, with the reason."""
    if sizes.beyond_triton:
        raise Unavailable(f"they have no {sizes.beyond_triton}")
    if not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device")
    try:
        # Triton takes seconds to load and may not be installed.
        from noria.kernels.triton_ops import TritonOps
    except ImportError as error:
        raise Unavailable(f"pip install 'noria[cuda]' ({error})") from error
    ops = TritonOps(torch.device("cuda"), on_gpu.dtype, deterministic=on_gpu.deterministic)
    try:
        ops.check_heads(sizes.head_dim, sizes.group)
    except ValueError as error:
        raise Unavailable(str(error)) from error
    return ops
