"""Load a model: weights, shape and fingerprint; or its tokenizer alone, or its shape, from the headers.

Knows the two kinds of checkpoint and nothing of who runs the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import cast

from noria.engine.models.build import Checkpoint, build_weights, tensor_names
from noria.engine.models.decoder import Decoder, Model
from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.gguf_tokenizer import gguf_tokenizer_files
from noria.engine.models.hf_config import NO_ARCHITECTURE, READERS, architecture_of
from noria.engine.models.hf_tokenizer import hf_tokenizer_files
from noria.engine.models.precision import AS_STORED, Precision, RoundedCheckpoint
from noria.engine.models.safetensors_checkpoint import SafetensorsCheckpoint, read_json, refuse_quantised
from noria.engine.models.sharded_ops import ShardedOps, Shards, shard_weights
from noria.engine.models.shards import ShardedCheckpoint, Shares
from noria.engine.models.source import ModelSource
from noria.engine.models.spec import Ends, ModelSpec
from noria.engine.parallel import WHOLE, Parallel
from noria.engine.wire.messages import TokenizerFiles
from noria.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `fingerprint` names weights and precision: equal ones compute the same."""

    model: Model
    spec: ModelSpec
    fingerprint: str


def inspect(source: ModelSource) -> ModelSpec:
    """The model's shape from the headers alone; `ModelSpec.weight_bytes` says what loading it will take."""
    return _foreign().foreign_spec(source.path) if is_foreign(source) else open_checkpoint(source).spec()


def is_foreign(source: ModelSource) -> bool:
    """Whether the model is of no family that we compute ourselves, so that transformers' module may."""
    if source.kind != "safetensors":
        return False
    config = read_json(source.path / "config.json")
    architecture = architecture_of(config)
    if architecture in READERS or architecture == NO_ARCHITECTURE:
        return False
    refuse_quantised(source.path, config)
    return True


def stored_bytes(source: ModelSource, parallel: Parallel = WHOLE) -> int:
    """Bytes that the model's tensors, or a rank's part of them, take on disk. Raises ModelError where the model cannot
    be divided so."""
    if is_foreign(source):
        return inspect(source).weight_bytes
    checkpoint = _part(open_checkpoint(source), parallel)
    return sum(checkpoint.num_bytes(name) for name in tensor_names(checkpoint.spec(), _ends(parallel)))


def tokenizer_files(source: ModelSource) -> TokenizerFiles:
    """What gateways need to speak for the model: small, and there without its weights. Raises ModelError where there is
    none, without which a model cannot be served."""
    if source.kind == "gguf":
        return gguf_tokenizer_files(GGUFCheckpoint(source.path).file)
    return hf_tokenizer_files(source.path)


def load(
    source: ModelSource,
    ops: Ops,
    *,
    progress: Callable[[int, int], None] | None = None,
    precision: Precision = AS_STORED,
    parallel: Parallel = WHOLE,
    shards: Shards | None = None,
    max_len: int = 0,
) -> LoadedModel:
    """Read the whole model, or a rank's part of it, into memory, laid out for `ops`, to serve `max_len` tokens at most
    (0: what it can). `progress` gets bytes read and bytes in all; `shards` are the ranks that share the stage, where
    there are several.

    Raises ModelError when a file is broken, a tensor is missing or the architecture is not supported.
    """
    if is_foreign(source):
        return _load_foreign(source, ops, precision, parallel, progress)
    whole = open_checkpoint(source)
    model = build_decoder(
        whole, ops, progress=progress, precision=precision, parallel=parallel, shards=shards, max_len=max_len
    )
    spec = whole.spec().for_length(max_len or whole.spec().max_len)
    fingerprint = _fingerprint(spec, whole, ops, precision, parallel.tp)
    return LoadedModel(model, spec, fingerprint)


def _load_foreign(
    source: ModelSource,
    ops: Ops,
    precision: Precision,
    parallel: Parallel,
    progress: Callable[[int, int], None] | None,
) -> LoadedModel:
    if precision != AS_STORED or parallel.size > 1:
        raise ModelError(f"{source.path}: --dtype, --quantize, --tp and --pp are for models that we compute ourselves")
    foreign = _foreign()
    model = foreign.ForeignDecoder(source.path, foreign.foreign_spec(source.path), ops)
    if progress is not None:
        progress(source.size_bytes, source.size_bytes)
    return LoadedModel(model, model.spec, foreign.fingerprint_of(model))


def _foreign() -> ModuleType:
    # transformers takes seconds to load, which the families that we compute ourselves need not wait for.
    import noria.engine.models.foreign as foreign

    return foreign


def build_decoder(
    whole: Checkpoint,
    ops: Ops,
    *,
    progress: Callable[[int, int], None] | None = None,
    precision: Precision = AS_STORED,
    parallel: Parallel = WHOLE,
    shards: Shards | None = None,
    max_len: int = 0,
) -> Decoder:
    """The decoder, or a rank's part of it; see `load`."""
    checkpoint = _part(whole, parallel)
    if precision != AS_STORED:
        checkpoint = RoundedCheckpoint(checkpoint, precision)
    spec = checkpoint.spec().for_length(max_len or checkpoint.spec().max_len)
    weights = build_weights(spec, checkpoint, ops, progress, _ends(parallel))
    if isinstance(checkpoint, RoundedCheckpoint):
        checkpoint.refuse_if_useless()
    if shards is not None:
        ids = [Shares.of(whole.spec(), replace(parallel, rank=shard)).vocab for shard in range(parallel.tp)]
        weights = shard_weights(weights, ids[parallel.shard], tuple(map(len, ids)))
        ops = cast(Ops, ShardedOps(ops, shards))
    return Decoder(spec, weights, ops)


def _part(whole: Checkpoint, parallel: Parallel) -> Checkpoint:
    return whole if parallel.size == 1 else ShardedCheckpoint(whole, parallel)


def _ends(parallel: Parallel) -> Ends:
    return Ends(parallel.is_first, parallel.is_last)


def open_checkpoint(source: ModelSource) -> GGUFCheckpoint | SafetensorsCheckpoint:
    """Read its headers. Raises ModelError."""
    return GGUFCheckpoint(source.path) if source.kind == "gguf" else SafetensorsCheckpoint(source.path)


def _fingerprint(spec: ModelSpec, checkpoint: Checkpoint, ops: Ops, precision: Precision, tp: int) -> str:
    """Hash of the shape, the kernels, and the bytes of a few tensors: free of file names and dates. Sums over shards
    are rounded in another order."""
    shards = f" tp {tp}" if tp > 1 else ""
    kept = "" if precision == AS_STORED else f" {precision.dtype} {precision.quantize}"
    digest = hashlib.sha256(f"{ops.name} {sorted(asdict(spec).items())}{kept}{shards}".encode())
    for name in tensor_names(spec):
        digest.update(f"{name} {checkpoint.num_bytes(name)}".encode())
    for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
        digest.update(checkpoint.tensor(name).numpy().tobytes())
    return f"fp_{digest.hexdigest()[:12]}"
