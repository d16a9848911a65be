"""A Hugging Face folder as a checkpoint: config.json as a ModelSpec, tensors from (sharded) safetensors files.

Knows that folder's layout; the tokenizer's files are `hf_tokenizer`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from noria.engine.models.errors import ModelError
from noria.engine.models.spec import ModelSpec, RopeSpec
from noria.kernels.weights import Weight

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one when there is no such file. ModelError when it is broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content


class SafetensorsCheckpoint:
    """See `build.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.label = str(folder)
        self._folder = folder
        self._config = read_json(folder / "config.json")
        if not self._config:
            raise ModelError(f"{folder}: no config.json in the folder")
        self._spec = self._read_spec()
        self._file_by_tensor: dict[str, Any] = {}
        self._open_files()

    def spec(self) -> ModelSpec:
        return self._spec

    def num_bytes(self, name: str) -> int:
        file = self._file_by_tensor.get(name)
        if file is None:
            return 0
        piece = file.get_slice(name)
        size = _BYTES_BY_DTYPE.get(piece.get_dtype(), 4)
        for length in piece.get_shape():
            size *= length
        return size

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        try:
            piece = self._file_by_tensor[name].get_slice(name)
            values: Tensor = piece[rows, columns] if len(piece.get_shape()) == 2 else piece[rows]
        except SafetensorError as error:
            raise ModelError(f"{self.label}: tensor {name} cannot be read: {error}") from error
        if not values.is_floating_point():
            raise ModelError(f"{self.label}: tensor {name} holds {values.dtype}: not supported")
        # Tensors of the file are views of its mapping: the copy lets the mapping go.
        return values.to(torch.float32, copy=True)

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        return self.tensor(name, rows, columns)

    def _open_files(self) -> None:
        index = read_json(self._folder / "model.safetensors.index.json").get("weight_map")
        names = sorted(set(index.values())) if index else [path.name for path in self._folder.glob("*.safetensors")]
        if not names:
            raise ModelError(f"{self._folder}: no *.safetensors file in the folder")
        for name in names:
            path = self._folder / name
            try:
                file = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{path}: this shard is missing") from error
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: broken or truncated safetensors file ({error})") from error
            self._file_by_tensor.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]

    def _read_spec(self) -> ModelSpec:
        config = self._config
        architecture = str((config.get("architectures") or ["(none)"])[0])
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{self.label}: architecture {architecture!r} is not supported ({', '.join(ARCHITECTURES)})"
            )
        self._refuse_variants(architecture)
        try:
            num_heads = int(config["num_attention_heads"])
            return ModelSpec(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=int(config["hidden_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
                ffn_size=int(config["intermediate_size"]),
                norm_eps=float(config["rms_norm_eps"]),
                rope=self._read_rope(),
                max_len=int(config["max_position_embeddings"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False)),
                output_bias=architecture == "LlamaForCausalLM" and bool(config.get("attention_bias", False)),
                ffn_bias=bool(config.get("mlp_bias", False)),
                eos_token_ids=self._eos_token_ids(),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{self.label}/config.json: {error!r}") from error

    def _refuse_variants(self, architecture: str) -> None:
        config = self._config
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unnamed")
            raise ModelError(f"{self.label}: quantised checkpoints ({method}) are not supported")
        slides = (
            config.get("use_sliding_window") if architecture == "Qwen2ForCausalLM" else config.get("sliding_window")
        )
        if slides:
            raise ModelError(f"{self.label}: sliding-window attention is not supported")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{self.label}: activation {config['hidden_act']!r} is not supported")

    def _read_rope(self) -> RopeSpec:
        # transformers 5 writes one object; before, the base stood beside the scaling.
        settings = self._config.get("rope_parameters") or {}
        scaling = settings or self._config.get("rope_scaling") or {}
        base = float(settings.get("rope_theta") or self._config.get("rope_theta") or 10000.0)
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        if float(scaling.get("partial_rotary_factor", self._config.get("partial_rotary_factor", 1.0))) != 1.0:
            raise ModelError(f"{self.label}: rotary embedding of a part of the head is not supported")
        if kind == "default":
            return RopeSpec(base)
        if kind == "linear":
            return RopeSpec(base, "linear", factor=float(scaling["factor"]))
        if kind == "llama3":
            return RopeSpec(
                base,
                "llama3",
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_len=int(scaling["original_max_position_embeddings"]),
            )
        raise ModelError(f"{self.label}: rope scaling {kind!r} is not supported")

    def _eos_token_ids(self) -> tuple[int, ...]:
        # generation_config.json names all of them, config.json often the first alone.
        generation = read_json(self._folder / "generation_config.json")
        ids = generation.get("eos_token_id", self._config.get("eos_token_id"))
        return tuple(sorted({int(token) for token in (ids if isinstance(ids, list) else [ids]) if token is not None}))


_BYTES_BY_DTYPE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
