"""What a PEFT folder's adapter_config.json says: which linears a LoRA adapter is on, of which rank and scale.

Knows PEFT's words; no tensor and no model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import regex

from noria.engine.models.errors import ModelError
from noria.engine.models.safetensors_checkpoint import read_json

V = TypeVar("V")

CONFIG_FILE = "adapter_config.json"

_MATCH_SECONDS = 0.1

_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "modules_to_save": "whole modules trained beside the adapter",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "LoRA on parameters that are no linear layer's",
    "lora_bias": "a bias in LoRA's own layers",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
"""Settings of PEFT that change what is computed, by what they are."""

_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the base model's weights as they were."""


class LoraConfig(msgspec.Struct, frozen=True):
    """As PEFT writes it. `r` and `lora_alpha` are those of modules that no pattern names."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    base_model_name_or_path: str | None = None
    label: str = ""  # its file, for messages

    def targets(self, module: str, layer: int) -> bool:
        """Whether the linear `module` of this layer has an adapter. All do where the file names none: then its tensors
        say so."""
        if self.exclude_modules and self._matches(self.exclude_modules, module):
            return False
        if self.layers_to_transform is not None:
            only = self.layers_to_transform
            if layer not in ([only] if isinstance(only, int) else only):
                return False
        return self.target_modules is not None and (
            self.target_modules == "all-linear" or self._matches(self.target_modules, module)
        )

    def rank(self, module: str) -> int:
        return self._patterned(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What the product of the two matrices is multiplied by."""
        rank, alpha = self.rank(module), self._patterned(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _matches(self, wanted: list[str] | str, module: str) -> bool:
        """As PEFT has it: a list names modules or their last parts, a text is an expression for the whole name."""
        if isinstance(wanted, str):
            return self._match(wanted, module)
        return any(module == name or module.endswith(f".{name}") for name in wanted)

    def _match(self, pattern: str, module: str) -> bool:
        """Whether it is the whole name. Raises ModelError for an expression that takes too long: it comes with a
        file from who knows where, and nothing else runs meanwhile."""
        try:
            return regex.fullmatch(pattern, module, timeout=_MATCH_SECONDS) is not None
        except TimeoutError:
            raise ModelError(f"{self.label}: the expression {pattern!r} takes too long to match") from None

    def _patterned(self, patterns: dict[str, V], module: str, default: V) -> V:
        """The value of the first pattern that the end of the module's name matches."""
        for pattern, value in patterns.items():
            if self._match(rf"(.*\.)?({pattern})", module):
                return value
        return default


def read_config(folder: Path) -> LoraConfig:
    """Raises ModelError, naming the file, for one that is missing, broken, or asks for what is not supported."""
    path = folder / CONFIG_FILE
    found = read_json(path)
    if not found:
        raise ModelError(f"{path}: there is no such file, or nothing in it: not a PEFT adapter")
    kind = found.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: adapters of type {kind!r} are not supported, only LORA")
    for name, what in _REFUSED.items():
        if found.get(name):
            raise ModelError(f"{path}: {name}: {what} is not supported")
    if found.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias = {found['bias']!r}: trained biases are not supported")
    if (begin := found.get("init_lora_weights", True)) not in _KEEPS_BASE:
        raise ModelError(f"{path}: init_lora_weights = {begin!r} changes the base model: convert it to a plain adapter")
    return _checked(path, found)


def _checked(path: Path, found: dict[str, Any]) -> LoraConfig:
    given = {name: value for name, value in found.items() if value is not None}
    try:
        config = msgspec.convert(given, LoraConfig)
        for patterns in (config.rank_pattern, config.alpha_pattern):
            for pattern in patterns:
                regex.compile(pattern)
        for chosen in (config.target_modules, config.exclude_modules):
            if isinstance(chosen, str):
                regex.compile(chosen)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from None
    except regex.error as error:
        raise ModelError(f"{path}: {error.pattern!r} is no regular expression: {error}") from None
    if min([config.r, *config.rank_pattern.values()]) < 1:
        raise ModelError(f"{path}: a rank is at least 1")
    if not all(math.isfinite(alpha) for alpha in (config.lora_alpha, *config.alpha_pattern.values())):
        raise ModelError(f"{path}: lora_alpha must be a finite number")
    return msgspec.structs.replace(config, label=str(path))
