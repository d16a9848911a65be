"""CUDA graphs of decode steps, and that choosing tokens on the device waits for it once: what only a GPU can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import tiny_model
from noria.engine.execution import device_sampler
from noria.engine.execution.decode_graphs import CudaGraphs, DecodeGraphs
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.step import RowInput, RowOutput, Sampling, StepInput
from noria.engine.models.decoder import Decoder
from noria.engine.models.load import load
from noria.engine.models.source import resolve
from noria.engine.wire.messages import SamplingParams
from noria.kernels.float8 import float8_linear, to_float8
from noria.kernels.triton_ops import TritonOps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
WARM = SamplingParams(max_tokens=9, temperature=0.9, seed=5, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.1)


def test_a_replay_computes_what_the_launches_do_and_compiles_nothing(tmp_path: Path) -> None:
    ops = TritonOps(torch.device("cuda"), torch.bfloat16, deterministic=True)
    model = load(resolve(str(tiny_model.make(tmp_path))), ops).model
    assert isinstance(model, Decoder)
    spec = model.spec
    runners, pools = [], []
    for with_graphs in (False, True):
        kv = ops.new_kv_pools(spec.num_layers, 64, 16, spec.num_kv_heads, spec.head_dim, torch.bfloat16)
        graphs = DecodeGraphs(model, kv, CudaGraphs(), max_rows=16, max_len=256) if with_graphs else None
        runners.append(ModelRunner(model, kv, 16, graphs=graphs))
        pools.append(kv)
    prompts = StepInput([RowInput(list(range(3, 20 + i)), 0, [3 * i, 3 * i + 1, 3 * i + 2], None) for i in range(9)], 0)
    for runner in runners:
        runner.execute(prompts)
    starts = [17 + i for i in range(9)]
    for number, count in enumerate((1, 2, 3, 9, 9, 5)):
        params = WARM if number % 2 else GREEDY
        rows = [
            RowInput([7 + i], starts[i], [3 * i, 3 * i + 1, 3 * i + 2], Sampling(params, starts[i], (1, [4, 5])))
            for i in range(count)
        ]
        step = StepInput(rows, count)
        if number:
            ops.compiles.num = 0
        assert runners[0].execute(step) == runners[1].execute(step)
        if number:
            assert ops.compiles.num == 0
        starts = [start + (i < count) for i, start in enumerate(starts)]
    for plain, replayed in zip((*pools[0].keys, *pools[0].values), (*pools[1].keys, *pools[1].values), strict=True):
        assert torch.equal(plain, replayed)


def test_a_step_waits_for_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its ids are read: here, for a mixed step, they are not."""
    ops = TritonOps(torch.device("cuda"), torch.bfloat16)
    model = load(resolve(str(tiny_model.make(tmp_path))), ops).model
    spec = model.spec
    kv = ops.new_kv_pools(spec.num_layers, 8, 16, spec.num_kv_heads, spec.head_dim, torch.bfloat16)
    runner = ModelRunner(model, kv, 16)
    warm, plain = Sampling(WARM, 4, (1, [2, 3, 3]), (5,)), Sampling(GREEDY, 4)
    step = StepInput([RowInput([5], 6, [2], warm), RowInput([9, 8, 7], 0, [4], plain)], 1)
    runner.execute(step)
    launched: list[Tensor] = []

    def unread(logits: Tensor, rows: list[Sampling]) -> list[RowOutput]:
        launched.append(device_sampler.launch(logits, rows, {}))
        return [RowOutput()] * len(rows)

    monkeypatch.setattr(runner, "_sample", unread)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.execute(step)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert launched[0].shape == (2, 2)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="no fp8 rows")
def test_products_of_8_bit_floats_are_those_of_the_rounded_numbers() -> None:
    x = torch.randn(37, 512, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(256, 512, device="cuda"), torch.randn(256, device="cuda", dtype=torch.bfloat16)
    rounded, scale = to_float8(weight)
    own, mine = to_float8(x)
    exact = (own.double() * mine) @ (rounded.double() * scale).t() + bias
    found = float8_linear(x, rounded, scale.t().contiguous(), bias)
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-2
