"""The precisions that are asked for, checked against what these kernels compute in and what this GPU can.

Knows settings and backends; reads no weights.
"""

from __future__ import annotations

import torch

from noria.engine.config import EngineConfig
from noria.engine.models.precision import DTYPES, Precision
from noria.kernels import float8
from noria.kernels.ops import Ops

# Plain torch would widen all it reads at every step.
_KV_DTYPE_OF = {"triton": "bf16", "native": "fp16", "torch": "fp32"}


def precision_of(config: EngineConfig, ops: Ops) -> Precision:
    """Of the weights. Raises ValueError for one that these kernels do not compute in."""
    if config.quantize == "fp8":
        _check_capability("--quantize fp8", (9, 0), ops)
        if config.deterministic or config.dtype not in ("auto", "bf16"):
            raise ValueError(
                "--quantize fp8 goes with bf16, and has not the same bits in any batch: leave --dtype and "
                "--deterministic away"
            )
    elif config.quantize != "none" and ops.name != "native":
        raise ValueError(
            f"--quantize {config.quantize} needs the C kernels (--kernels native): {ops.name} has no integers"
        )
    if config.dtype in ("fp16", "bf16") and ops.name == "torch":
        raise ValueError(f"--dtype {config.dtype} needs the C kernels or a GPU: plain torch computes in fp32")
    return Precision(config.dtype, config.quantize)


def kv_dtype_of(config: EngineConfig, ops: Ops) -> torch.dtype:
    """What keys and values are kept as. Raises ValueError where these kernels cannot read that."""
    if config.kv_dtype == "fp8":
        _check_capability("--kv-dtype fp8", (8, 9), ops)
        if config.dtype == "fp32":
            raise ValueError("--kv-dtype fp8 goes with bf16 or fp16: leave --dtype fp32 away")
        return float8.DTYPE
    if config.kv_dtype != "auto":
        return DTYPES[config.kv_dtype]
    return DTYPES[config.dtype if ops.name == "triton" and config.dtype != "auto" else _KV_DTYPE_OF[ops.name]]


def _check_capability(option: str, least: tuple[int, int], ops: Ops) -> None:
    """Raises ValueError where there are no 8-bit floats of that kind."""
    needs = f"{option} needs a GPU of compute capability {least[0]}.{least[1]}"
    if ops.name != "triton" or ops.device.type != "cuda":
        raise ValueError(f"{needs}: {ops.name} kernels have no fp8")
    major, minor = torch.cuda.get_device_capability(ops.device)
    if (major, minor) < least:
        raise ValueError(f"{needs}: this one has {major}.{minor}")
