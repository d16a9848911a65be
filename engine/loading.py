"""Loads what a rank computes with: its weights, its KV pools, and around them the runner or the stage.

Knows what was planned; no scheduler and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from noria.engine.execution.data_channel import DataChannel
from noria.engine.execution.decode_graphs import CudaGraphs, DecodeGraphs
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.stage import Report, Stage
from noria.engine.execution.step import RowInput, StepInput
from noria.engine.models.decoder import Decoder, Model
from noria.engine.models.load import LoadedModel, build_decoder, load, open_checkpoint
from noria.engine.models.lora import Adapter
from noria.engine.plan import Plan

Progress = Callable[[int, int], None]


def load_model(plan: Plan, progress: Progress | None = None, channel: DataChannel | None = None) -> LoadedModel:
    """What the first rank computes with. `progress` gets bytes done and bytes in all; `channel` leads to
    the other ranks, where there are any."""
    torch.set_num_threads(plan.threads)
    return load(
        plan.source,
        plan.ops,
        progress=progress,
        precision=plan.precision,
        max_len=plan.max_model_len,
        parallel=plan.parallel,
        shards=channel if plan.parallel.tp > 1 else None,
    )


def load_part(plan: Plan, channel: DataChannel) -> Model:
    """What another rank computes with."""
    torch.set_num_threads(plan.threads)
    return build_decoder(
        open_checkpoint(plan.source),
        plan.ops,
        precision=plan.precision,
        max_len=plan.max_model_len,
        parallel=plan.parallel,
        shards=channel if plan.parallel.tp > 1 else None,
    )


def new_runner(plan: Plan, model: Model, adapters: Mapping[str, Adapter] | None = None) -> ModelRunner:
    """`model` with its KV pools, and the adapters that are loaded beside it from now on."""
    groups = plan.groups
    pools = plan.ops.new_kv_pools(
        groups.depth,
        plan.num_blocks,
        plan.config.block_size,
        plan.part.num_kv_heads,
        plan.part.head_dim,
        plan.kv_dtype,
    )
    pools = pools.for_layers(groups.places, groups.of_layer)
    graphs = None
    if plan.has_graphs and isinstance(model, Decoder):
        rows, length = plan.config.max_batch_size, plan.max_model_len
        graphs = DecodeGraphs(model, pools, CudaGraphs(), max_rows=rows, max_len=length, num_groups=len(groups.windows))
    return ModelRunner(model, pools, plan.config.block_size, adapters, len(groups.windows), graphs)


def new_stage(plan: Plan, model: Model, channel: DataChannel, report: Report) -> Stage:
    """The runner of one rank among several, at work."""
    runner, width = new_runner(plan, model), plan.spec.hidden_size
    return Stage(runner, channel, plan.parallel, width=width, dtype=plan.activations, report=report)


def warm_up_steps(plan: Plan) -> list[StepInput]:
    """The first call pays for lazy set-up, and on a GPU for the compiling of kernels: no client's. There, a prompt, a
    short decode row and one of several splits are all the variants there are."""
    num_groups = len(plan.groups.windows)
    steps = [StepInput([RowInput([0], 0, [0] * num_groups, None)], 0)]
    if plan.ops.name == "triton":
        for computed in (1, min(1024, plan.max_model_len - 1)):
            blocks = [0] * (computed // plan.config.block_size + 1) * num_groups
            steps.append(StepInput([RowInput([0], computed, blocks, None)], 1))
    return steps
