"""Small tensors on their way to a device. Knows nothing of what they hold."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. A GPU is not waited for: that would take until all it was told before is done, and is so
    where the copy comes from memory that the system may move."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
