"""Load a model: weights, shape, tokenizer and fingerprint; or its shape alone, from the headers.

Knows the two kinds of checkpoint and nothing of who runs the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

from noria.engine.models.build import Checkpoint, build_weights, tensor_names
from noria.engine.models.decoder import Decoder
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.gguf_tokenizer import gguf_tokenizer_files
from noria.engine.models.hf_tokenizer import hf_tokenizer_files
from noria.engine.models.safetensors_checkpoint import SafetensorsCheckpoint
from noria.engine.models.source import ModelSource
from noria.engine.models.spec import ModelSpec
from noria.engine.wire.messages import TokenizerFiles
from noria.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `fingerprint` names weights and precision: equal ones compute the same."""

    model: Decoder
    spec: ModelSpec
    tokenizer_files: TokenizerFiles
    fingerprint: str


def inspect(source: ModelSource) -> ModelSpec:
    """The model's shape from the headers alone; `ModelSpec.weight_bytes` says what loading it will take."""
    return _open(source).spec()


def stored_bytes(source: ModelSource) -> int:
    """Bytes that the model's tensors take on disk."""
    checkpoint = _open(source)
    return sum(checkpoint.num_bytes(name) for name in tensor_names(checkpoint.spec()))


def load(
    source: ModelSource, ops: Ops, *, max_len: int = 0, progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Read the whole model into memory, laid out for `ops`, to serve `max_len` tokens at most (0: what it can).
    `progress` gets bytes read and bytes in all.

    Raises ModelError when a file is broken, a tensor is missing or the architecture is not supported.
    """
    checkpoint = _open(source)
    spec = checkpoint.spec()
    spec = spec.for_length(max_len or spec.max_len)
    # The tokenizer first: it is small, and a model without one cannot be served.
    tokenizer_files = (
        gguf_tokenizer_files(checkpoint.file)
        if isinstance(checkpoint, GGUFCheckpoint)
        else hf_tokenizer_files(source.path)
    )
    weights = build_weights(spec, checkpoint, ops, progress)
    return LoadedModel(Decoder(spec, weights, ops), spec, tokenizer_files, _fingerprint(spec, checkpoint, ops))


def _open(source: ModelSource) -> GGUFCheckpoint | SafetensorsCheckpoint:
    return GGUFCheckpoint(source.path) if source.kind == "gguf" else SafetensorsCheckpoint(source.path)


def _fingerprint(spec: ModelSpec, checkpoint: Checkpoint, ops: Ops) -> str:
    """Hash of the shape, the kernels, and the bytes of a few tensors: free of file names and dates."""
    digest = hashlib.sha256(f"{ops.name} {sorted(asdict(spec).items())}".encode())
    for name in tensor_names(spec):
        digest.update(f"{name} {checkpoint.num_bytes(name)}".encode())
    for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
        digest.update(checkpoint.tensor(name).numpy().tobytes())
    return f"fp_{digest.hexdigest()[:12]}"
