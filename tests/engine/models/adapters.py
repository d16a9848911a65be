"""LoRA adapters as PEFT makes and computes them: the reference of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def make_adapter(base: Any, folder: Path, *, seed: int = 0, strength: float = 0.2, **config: Any) -> Any:
    """Write a random adapter of `base`, a model of transformers, into `folder`; returns PEFT's model with it, which
    computes. `base` is changed: its linears are wrapped."""
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, strength)
    model.save_pretrained(folder)
    return model.eval()
