"""What will be loaded by this rank and how much memory it gets: settings and file headers, checked against the machine.

Reads no weights. Knows no queue and no requests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import structlog
import torch

from noria.engine.config import EngineConfig, Rendezvous
from noria.engine.memory import Room, available, kv_bytes
from noria.engine.models.layer_groups import LayerGroups, group_layers
from noria.engine.models.load import inspect, stored_bytes
from noria.engine.models.pooling import PoolingKind, trained_pooling
from noria.engine.models.precision import DTYPES, Precision
from noria.engine.models.shards import Shares
from noria.engine.models.source import ModelSource, resolve
from noria.engine.models.spec import ModelSpec
from noria.engine.parallel import Parallel
from noria.engine.precisions import kv_dtype_of, precision_of
from noria.engine.scheduling.kv_groups import KVGroups
from noria.engine.scheduling.policy import POLICIES
from noria.kernels.choice import OnGPU, Sizes, choose
from noria.kernels.ops import Ops
from noria.kernels.pools import kv_bytes_per_block

log = structlog.get_logger("noria.engine")

_CHUNK_TOKENS_OF = {"triton": 512, "native": 12, "torch": 32}
"""Of prompts, beside running streams, where the operator does not say: as many as make an iteration of eight streams
about twice as long (docs/performance.md). A CPU has no reason to read more at once: chunks are read as fast."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be loaded, and how much memory it gets; made from file headers alone."""

    config: EngineConfig
    parallel: Parallel
    given: Rendezvous
    source: ModelSource
    spec: ModelSpec  # of the whole model
    part: ModelSpec  # of what this rank has of it
    name: str
    aliases: tuple[str, ...]
    max_model_len: int
    groups: LayerGroups  # of the part's layers
    num_blocks: int
    kv_bytes: int
    deterministic: bool
    precision: Precision
    activations: torch.dtype  # hidden states, as the operations give them
    kv_dtype: torch.dtype
    pooling: PoolingKind
    threads: int
    max_chunk_tokens: int
    ops: Ops

    @property
    def kv_tokens(self) -> int:
        """Of the longest text that the KV memory has room for, whatever the context allows."""
        size = self.num_blocks * self.config.block_size
        return _longest(self.config, self.groups, self.num_blocks, max(size, self.max_model_len))

    @property
    def beyond_adapters(self) -> str:
        """Why LoRA adapters cannot be loaded beside this model; empty where they can."""
        if self.spec.foreign_parameters:
            return "transformers computes this model: adapters need layers of our own"
        return "adapters are not divided among ranks: they need --tp 1 and --pp 1" if self.parallel.size > 1 else ""

    @property
    def has_graphs(self) -> bool:
        """Whether steps of decode rows alone are CUDA graphs: launches that are the same for any numbers, on one rank.
        Which experts compute is asked of the numbers."""
        return (
            self.config.cuda_graphs
            and self.ops.name == "triton"
            and self.ops.device.type == "cuda"
            and self.parallel.size == 1
            and self.spec.experts is None
        )

    def with_blocks(self, num_blocks: int) -> Plan:
        """With no more KV blocks than some other rank has room for."""
        num_blocks = min(num_blocks, self.num_blocks)
        size = self.kv_bytes // self.num_blocks
        limit = _longest(self.config, self.groups, num_blocks, self.max_model_len)
        return replace(self, num_blocks=num_blocks, kv_bytes=num_blocks * size, max_model_len=limit)


def plan(config: EngineConfig, given: Rendezvous | None = None) -> Plan:
    """Check that the model, or this rank's part of it, can be served with these settings on this machine. `given`: who
    this rank is, else the first of those that it starts itself.

    Raises ModelError, MemoryTooSmall or ValueError, each with one line for the operator.
    """
    given = given or Rendezvous()
    parallel = _parallel(config, given)
    here = (given.local_world_size or parallel.size) if parallel.size > 1 else 1  # ranks of this machine
    source = resolve(config.model)
    spec = inspect(source)
    part = Shares.of(spec, parallel).spec(spec) if parallel.size > 1 else spec
    if config.max_model_len > spec.max_len:
        raise ValueError(f"--max-model-len {config.max_model_len} is more than the model's {spec.max_len}")
    max_model_len = config.max_model_len or spec.max_len
    groups = group_layers(spec)
    group = part.num_heads // part.num_kv_heads
    sizes = Sizes(spec.hidden_size, spec.head_dim, part.ffn_step, config.block_size, group, spec.beyond_triton)
    threads = config.threads or max(1, (os.cpu_count() or 1) // here)
    if parallel.size > 1 and config.kernels in ("auto", "triton") and torch.cuda.is_available():
        _take_gpu(given.local_rank)
    on_gpu = OnGPU(torch.bfloat16 if config.dtype == "auto" else DTYPES[config.dtype], config.deterministic)
    ops = choose(config.kernels, sizes, threads, lambda why: log.warning("slower kernels compute", reason=why), on_gpu)
    # NCCL does not say in which order it adds the parts of shards; on CPUs they have one.
    deterministic = ops.deterministic and spec.keeps_bits and (parallel.tp == 1 or ops.device.type == "cpu")
    if config.deterministic and not deterministic:
        raise ValueError(
            "--deterministic needs the C kernels, or a GPU and --tp 1, and a model whose layers are all ours"
        )
    precision, kv_dtype = precision_of(config, ops), kv_dtype_of(config, ops)
    whole_prompts = POLICIES[config.policy].whole_prompts
    longest = kv_groups(config, groups).most(max_model_len, at_once=max_model_len if whole_prompts else 0)
    if parallel.size > 1:
        groups = groups.part(Shares.of(spec, parallel).layers)
    block_bytes = kv_bytes_per_block(groups.depth, config.block_size, part.num_kv_heads, spec.head_dim, kv_dtype)
    pool = kv_bytes(
        config.kv_memory,
        weight_bytes=_weight_bytes(spec, source, precision, ops, parallel),
        wanted=longest * config.max_batch_size * block_bytes,
        least=len(groups.windows) * block_bytes,
        room=_gpu_room(ops.device) if ops.device.type == "cuda" else Room(available() // here),
    )
    num_blocks = pool // block_bytes
    # What the pool cannot hold can never run: the context that clients are told is the one they can use.
    max_model_len = _longest(config, groups, num_blocks, max_model_len)
    name, *aliases = config.served_names or (source.name,)
    if taken := config.adapters.keys() & {name, *aliases}:
        raise ValueError(f"--lora {min(taken)}: this is a name of the model itself")
    pooling = (trained_pooling(source) or "mean") if config.pooling == "auto" else config.pooling
    planned = Plan(
        config=config,
        parallel=parallel,
        given=given,
        source=source,
        spec=spec,
        part=part,
        name=name,
        aliases=tuple(aliases),
        max_model_len=max_model_len,
        groups=groups,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block_bytes,
        deterministic=deterministic,
        precision=precision,
        activations=on_gpu.dtype if ops.name == "triton" else torch.float32,
        kv_dtype=kv_dtype,
        pooling=pooling,
        threads=threads,
        max_chunk_tokens=config.max_chunk_tokens or _CHUNK_TOKENS_OF[ops.name],
        ops=ops,
    )
    if config.adapters and planned.beyond_adapters:
        raise ValueError(f"--lora: {planned.beyond_adapters}")
    return planned


def kv_groups(config: EngineConfig, groups: LayerGroups) -> KVGroups:
    """What a text takes of the KV cache under these settings."""
    max_draft = config.draft_tokens if config.speculate == "ngram" else 0
    max_step = POLICIES[config.policy].max_step(config.max_batch_tokens, max_draft)
    return KVGroups(groups.windows, config.block_size, max_step)


def _longest(config: EngineConfig, groups: LayerGroups, num_blocks: int, at_most: int) -> int:
    whole_prompts = POLICIES[config.policy].whole_prompts
    return kv_groups(config, groups).longest(num_blocks, at_most, whole_prompts=whole_prompts)


def _parallel(config: EngineConfig, given: Rendezvous) -> Parallel:
    parallel = Parallel(given.rank if given.is_given else 0, config.tp, config.pp)
    if parallel.size == 1:
        return Parallel()
    if given.is_given and given.world_size != parallel.size:
        raise ValueError(f"--tp {config.tp} and --pp {config.pp} make {parallel.size} ranks, not {given.world_size}")
    if given.rank >= parallel.size:
        raise ValueError(f"there is no rank {given.rank} among {parallel.size}")
    return parallel


def _weight_bytes(spec: ModelSpec, source: ModelSource, precision: Precision, ops: Ops, parallel: Parallel) -> int:
    """What the weights, or this rank's part of them, take once they are laid out."""
    stored = stored_bytes(source) if ops.name == "native" or parallel.size > 1 else 0  # reads the headers again
    if ops.name == "triton":
        whole = spec.weight_bytes if precision.dtype == "fp32" else spec.weight_bytes // 2
        if precision.quantize == "fp8":
            tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
            whole = whole // 2 + tables  # of two bytes, others of one
    else:
        whole = spec.weight_bytes if ops.name == "torch" else precision.weight_bytes(spec, stored)
    return whole if parallel.size == 1 else whole * stored_bytes(source, parallel) // max(stored, 1)


def _take_gpu(local_rank: int) -> None:
    """Ranks of one machine have a GPU each."""
    if local_rank >= torch.cuda.device_count():
        raise ValueError(f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)


def _gpu_room(device: torch.device) -> Room:
    """A GPU has nothing better to do with its memory; a tenth is for activations and torch itself."""
    free, _ = torch.cuda.mem_get_info(device)
    return Room(free, share=0.9, limit=free)
