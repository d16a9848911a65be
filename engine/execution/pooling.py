"""Folds the hidden states of a prompt into one vector, chunk by chunk.

Knows no requests and no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noria.engine.execution.step import Pooling


def pool(hidden: Tensor, pooling: Pooling, num_tokens: int) -> bytes | None:
    """Fold the final hidden states [chunk, C] of a row into what earlier chunks gave.

    With the prompt's last chunk, which makes `num_tokens` in all, this is the vector: C little-endian float32. Before,
    it is the sum so far, which the next chunk must carry; it is kept in float64, so that the cut into chunks does not
    show in the mean. None where the hidden states are not finite.
    """
    if pooling.kind == "last":
        hidden = hidden[-1:]
    if not bool(torch.isfinite(hidden).all()):
        return None
    if pooling.kind == "last":
        return _packed(hidden[0], "<f4")
    total = hidden.sum(dim=0, dtype=torch.float64)
    if pooling.carried:
        total += torch.frombuffer(bytearray(pooling.carried), dtype=torch.float64).to(total.device)
    return _packed(total / num_tokens, "<f4") if pooling.is_last else _packed(total, "<f8")


def _packed(values: Tensor, dtype: str) -> bytes:
    return values.cpu().numpy().astype(dtype, copy=False).tobytes()
