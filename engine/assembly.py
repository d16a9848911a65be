"""Puts an engine together from its settings: model, KV pools, scheduler, executor, and the card that describes them.

Used by the serving process and by offline generation. Knows no queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from noria.engine.adapters import Adapters
from noria.engine.execution.executor import Executor, LocalExecutor
from noria.engine.execution.rendezvous import host
from noria.engine.grammar.grammars import Grammars
from noria.engine.loading import Progress, load_model, new_runner, warm_up_steps
from noria.engine.models.generation import sampling_defaults
from noria.engine.models.load import LoadedModel, tokenizer_files
from noria.engine.models.lora import load_adapter
from noria.engine.plan import Plan, kv_groups
from noria.engine.ranks import start_ranks
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.trace import IterationLog, TraceStart
from noria.engine.wire.messages import ModelCard, TokenizerFiles


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded engine without a queue."""

    card: ModelCard
    tokenizer_files: TokenizerFiles
    scheduler: Scheduler
    executor: Executor
    grammars: Grammars
    adapters: Adapters | None  # None: there can be none

    def close(self) -> None:
        if self.adapters is not None:
            self.adapters.close()
        self.executor.close()
        self.grammars.close()


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


def assemble(
    plan: Plan, progress: Progress | None = None, announce: Callable[[TokenizerFiles], None] | None = None
) -> Assembly:
    """Load the weights and build everything around them, on as many ranks as are planned. `progress` gets bytes done
    and bytes in all, of this rank's; `announce` the tokenizer, before the weights are read. Raises RankLost where
    another one does not come or go on, ModelError for an adapter that is no good."""
    tokenizer = tokenizer_files(plan.source)
    if announce is not None:
        announce(tokenizer)
    adapters = None if plan.beyond_adapters else Adapters(lambda folder: load_adapter(folder, plan.spec, plan.ops))
    executor, loaded, plan = _executor(plan, progress, adapters)
    for step in warm_up_steps(plan):
        executor.run(step)
    plan.ops.compiles.num = 0
    config, spec, groups = plan.config, plan.spec, kv_groups(plan.config, plan.groups)
    policy = POLICIES[config.policy]
    # The baselines are the paper's: no prefix is shared there.
    prefix_cache = config.prefix_cache and not policy.reserve_output
    scheduler = Scheduler(
        policy,
        KVBlocks(plan.num_blocks, config.block_size, prefix_cache, groups.windows, groups.max_step),
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
        kv_tokens=plan.kv_tokens,
        block_size=config.block_size,
        kv_limits=groups.limits if groups.is_windowed else (),
        eos_token_ids=spec.eos_token_ids,
        reserve_output=policy.reserve_output,
        policy=policy.name,
        fingerprint=loaded.fingerprint,
        embedding_size=spec.hidden_size,
        pooling=plan.pooling,
        deterministic=plan.deterministic,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        sampling_defaults=sampling_defaults(plan.source) if config.generation_config == "auto" else {},
        takes_adapters=adapters is not None,
    )
    grammars = Grammars(
        tokenizer,
        vocab_size=spec.vocab_size,
        stop_token_ids=spec.eos_token_ids,
        seconds=config.grammar_timeout,
    )
    return Assembly(card, tokenizer, scheduler, executor, grammars, adapters)


def _executor(plan: Plan, progress: Progress | None, adapters: Adapters | None) -> tuple[Executor, LoadedModel, Plan]:
    if plan.parallel.size > 1:
        return start_ranks(plan, host(plan.config, plan.parallel.size, plan.given), progress)
    loaded = load_model(plan, progress)
    if adapters is not None:
        for name, folder in plan.config.adapters.items():
            adapters.load_now(name, folder)
    runner = new_runner(plan, loaded.model, None if adapters is None else adapters.loaded)
    return LocalExecutor(runner.execute), loaded, plan
