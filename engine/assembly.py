"""Puts an engine together from its settings: model, KV pools, scheduler, executor, and the card that describes them.

Used by the serving process and by offline generation. Knows no queue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from noria.engine.config import EngineConfig
from noria.engine.execution.executor import LocalExecutor
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.step import RowInput, StepInput
from noria.engine.grammar.grammars import Grammars
from noria.engine.memory import Room, kv_bytes
from noria.engine.models.load import inspect, load, stored_bytes
from noria.engine.models.pooling import PoolingKind, trained_pooling
from noria.engine.models.precision import DTYPES, Precision
from noria.engine.models.source import ModelSource, resolve
from noria.engine.models.spec import ModelSpec
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.trace import IterationLog, TraceStart
from noria.engine.wire.messages import ModelCard, TokenizerFiles
from noria.kernels.choice import Sizes, choose
from noria.kernels.ops import Ops
from noria.kernels.pools import kv_bytes_per_block

log = structlog.get_logger("noria.engine")

# Plain torch would widen all it reads at every step.
_KV_DTYPE_OF = {"triton": "bf16", "native": "fp16", "torch": "fp32"}

_CHUNK_TOKENS_OF = {"triton": 512, "native": 12, "torch": 32}
"""Of prompts, beside running streams, where the operator does not say: as many as make an iteration of eight streams
about twice as long (docs/performance.md). A CPU has no reason to read more at once: chunks are read as fast."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be loaded, and how much memory it gets; made from file headers alone."""

    config: EngineConfig
    source: ModelSource
    spec: ModelSpec
    name: str
    aliases: tuple[str, ...]
    max_model_len: int
    num_blocks: int
    kv_bytes: int
    precision: Precision
    kv_dtype: torch.dtype
    pooling: PoolingKind
    threads: int
    max_chunk_tokens: int
    ops: Ops


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded engine without a queue."""

    card: ModelCard
    tokenizer_files: TokenizerFiles
    scheduler: Scheduler
    executor: LocalExecutor
    grammars: Grammars

    def close(self) -> None:
        self.executor.close()
        self.grammars.close()


def plan(config: EngineConfig) -> Plan:
    """Check that the model can be served with these settings on this machine.

    Raises ModelError, MemoryTooSmall or ValueError, each with one line for the operator.
    """
    source = resolve(config.model)
    spec = inspect(source)
    if config.max_model_len > spec.max_len:
        raise ValueError(f"--max-model-len {config.max_model_len} is more than the model's {spec.max_len}")
    max_model_len = config.max_model_len or spec.max_len
    group = spec.num_heads // spec.num_kv_heads
    sizes = Sizes(spec.hidden_size, spec.head_dim, spec.ffn_step, config.block_size, group, spec.is_capped)
    threads = config.threads or os.cpu_count() or 1
    on_gpu = torch.bfloat16 if config.dtype == "auto" else DTYPES[config.dtype]
    ops = choose(config.kernels, sizes, threads, lambda why: log.warning("slower kernels compute", reason=why), on_gpu)
    precision = _precision(config, ops)
    kv_dtype = DTYPES[_kv_dtype(precision, ops) if config.kv_dtype == "auto" else config.kv_dtype]
    block_bytes = kv_bytes_per_block(spec.num_layers, config.block_size, spec.num_kv_heads, spec.head_dim, kv_dtype)
    pool = kv_bytes(
        config.kv_memory,
        weight_bytes=_weight_bytes(spec, source, precision, ops),
        wanted=-(-max_model_len // config.block_size) * config.max_batch_size * block_bytes,
        least=block_bytes,
        room=_gpu_room(ops.device) if ops.device.type == "cuda" else None,
    )
    num_blocks = pool // block_bytes
    # What the pool cannot hold can never run: the context that clients are told is the one they can use.
    max_model_len = min(max_model_len, num_blocks * config.block_size)
    name, *aliases = config.served_names or (source.name,)
    pooling = (trained_pooling(source) or "mean") if config.pooling == "auto" else config.pooling
    return Plan(
        config=config,
        source=source,
        spec=spec,
        name=name,
        aliases=tuple(aliases),
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block_bytes,
        precision=precision,
        kv_dtype=kv_dtype,
        pooling=pooling,
        threads=threads,
        max_chunk_tokens=config.max_chunk_tokens or _CHUNK_TOKENS_OF[ops.name],
        ops=ops,
    )


def _precision(config: EngineConfig, ops: Ops) -> Precision:
    """Raises ValueError for a precision that these kernels do not compute in."""
    if config.quantize != "none" and ops.name != "native":
        raise ValueError(
            f"--quantize {config.quantize} needs the C kernels (--kernels native): {ops.name} has no integers"
        )
    if config.dtype in ("fp16", "bf16") and ops.name == "torch":
        raise ValueError(f"--dtype {config.dtype} needs the C kernels or a GPU: plain torch computes in fp32")
    return Precision(config.dtype, config.quantize)


def _kv_dtype(precision: Precision, ops: Ops) -> str:
    return precision.dtype if ops.name == "triton" and precision.dtype != "auto" else _KV_DTYPE_OF[ops.name]


def _weight_bytes(spec: ModelSpec, source: ModelSource, precision: Precision, ops: Ops) -> int:
    """What the weights take once they are laid out."""
    if ops.name == "triton":
        return spec.weight_bytes if precision.dtype == "fp32" else spec.weight_bytes // 2
    return spec.weight_bytes if ops.name == "torch" else precision.weight_bytes(spec, stored_bytes(source))


def _gpu_room(device: torch.device) -> Room:
    """A GPU has nothing better to do with its memory; a tenth is for activations and torch itself."""
    free, _ = torch.cuda.mem_get_info(device)
    return Room(free, share=0.9, limit=free)


def open_trace(plan: Plan) -> IterationLog | None:
    """The iteration log, if one is wanted. Raises ValueError where it cannot be written."""
    config = plan.config
    if not config.trace_iterations:
        return None
    start = TraceStart(
        model=plan.name,
        policy=config.policy,
        max_batch_size=config.max_batch_size,
        max_batch_tokens=config.max_batch_tokens,
        max_chunk_tokens=plan.max_chunk_tokens,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        started=time.time(),
    )
    return IterationLog(Path(config.trace_iterations).expanduser(), start)


def _warm_up(runner: ModelRunner, plan: Plan) -> None:
    """The first call pays for lazy set-up, and on a GPU for the compiling of kernels: no client's. There, a prompt, a
    short decode row and one of several splits are all the variants there are."""
    steps = [StepInput([RowInput([0], 0, [0], None)], 0)]
    if plan.ops.name == "triton":
        for computed in (1, min(1024, plan.max_model_len - 1)):
            blocks = [0] * (computed // plan.config.block_size + 1)
            steps.append(StepInput([RowInput([0], computed, blocks, None)], 1))
    for step in steps:
        runner.execute(step)


def assemble(plan: Plan, progress: Callable[[int, int], None] | None = None) -> Assembly:
    """Load the weights and build everything around them. `progress` gets bytes done and bytes in all."""
    config, spec = plan.config, plan.spec
    torch.set_num_threads(plan.threads)
    loaded = load(plan.source, plan.ops, progress=progress, precision=plan.precision, max_len=plan.max_model_len)
    pools = plan.ops.new_kv_pools(
        spec.num_layers,
        plan.num_blocks,
        config.block_size,
        spec.num_kv_heads,
        spec.head_dim,
        plan.kv_dtype,
    )
    runner = ModelRunner(loaded.model, pools, config.block_size)
    _warm_up(runner, plan)
    executor = LocalExecutor(runner.execute)
    policy = POLICIES[config.policy]
    scheduler = Scheduler(
        policy,
        # The baselines are the paper's: no prefix is shared there.
        KVBlocks(plan.num_blocks, config.block_size, config.prefix_cache and not policy.reserve_output),
        max_batch_size=config.max_batch_size,
        max_batch_tokens=config.max_batch_tokens,
        max_chunk_tokens=plan.max_chunk_tokens,
        max_model_len=plan.max_model_len,
        num_stages=executor.depth,
        max_draft=config.draft_tokens if config.speculate == "ngram" else 0,
    )
    card = ModelCard(
        id=plan.name,
        aliases=plan.aliases,
        created=int(time.time()),
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        kv_tokens=plan.num_blocks * config.block_size,
        block_size=config.block_size,
        eos_token_ids=spec.eos_token_ids,
        reserve_output=policy.reserve_output,
        policy=policy.name,
        fingerprint=loaded.fingerprint,
        embedding_size=spec.hidden_size,
        pooling=plan.pooling,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )
    grammars = Grammars(
        loaded.tokenizer_files,
        vocab_size=spec.vocab_size,
        stop_token_ids=spec.eos_token_ids,
        seconds=config.grammar_timeout,
    )
    return Assembly(card, loaded.tokenizer_files, scheduler, executor, grammars)
