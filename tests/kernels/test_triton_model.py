"""A whole model whose operations are Triton's, in its interpreter, against plain torch; and where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from bench import tiny_model
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.ragged import flatten
from noria.engine.execution.step import RowInput, Sampling, StepInput
from noria.engine.models.build import build_weights
from noria.engine.models.decoder import Decoder
from noria.engine.models.load import load
from noria.engine.models.safetensors_checkpoint import SafetensorsCheckpoint
from noria.engine.models.source import resolve
from noria.engine.wire.messages import SamplingParams
from noria.kernels.choice import Sizes, choose
from noria.kernels.layers import LayerForm, run_layers
from noria.kernels.ops import Ops, Scores
from noria.kernels.torch_ops import TorchOps
from noria.kernels.triton_ops import TritonOps
from tests.engine.models import families
from tests.engine.models.ragged_steps import pools, step
from tests.kernels.triton_rows import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
BACKENDS: list[Ops] = [TorchOps(), TritonOps(DEVICE, torch.float32)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Decoder]:
    source = resolve(str(tiny_model.make(tmp_path_factory.mktemp("model"))))
    return [load(source, ops).model for ops in BACKENDS]


def mixed_step() -> StepInput:
    """A decode row at position 6, and a prompt of eight tokens whose first block is computed already."""
    sampling = Sampling(GREEDY, 0)
    return StepInput([RowInput([5], 6, [2], sampling), RowInput([9, 8, 7], 16, [4, 1], sampling)], 1)


def test_a_tiny_model_computes_what_plain_torch_does(models: list[Decoder]) -> None:
    first = StepInput([RowInput([3, 1, 4, 1, 5, 9], 0, [2], None), RowInput(list(range(20, 36)), 0, [4], None)], 0)
    logits, chosen = [], []
    for model in models:
        spec = model.spec
        kv = model.ops.new_kv_pools(spec.num_layers, 6, 16, spec.num_kv_heads, spec.head_dim, torch.float32)
        runner = ModelRunner(model, kv, 16)
        runner.execute(first)
        batch = flatten(mixed_step(), 16)
        logits.append(model.forward(batch.token_ids, batch.positions, kv, batch.layout, batch.logit_rows))
        chosen.append([output.token_ids for output in runner.execute(mixed_step())])
    assert logits[1].device.type == "cpu" and logits[1].dtype == torch.float32
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert chosen[0] == chosen[1]


def test_fused_layers_have_the_bits_of_their_operations(models: list[Decoder]) -> None:
    model, outputs = models[1], []
    batch, ops = flatten(mixed_step(), 16), model.ops
    x = torch.randn(len(batch.token_ids), model.spec.hidden_size, device=DEVICE)
    for composed in (False, True):
        kv = ops.new_kv_pools(2, 6, 16, model.spec.num_kv_heads, model.spec.head_dim, torch.float32)
        plan = ops.plan_step(batch.layout, batch.positions, torch.ones(20, model.spec.head_dim), kv, 4, Scores(0.25))
        layers = model._weights.layers
        if composed:
            outputs.append(run_layers(ops, x.clone(), layers, LayerForm(1e-5), kv, [plan] * len(layers)))
        else:
            outputs.append(ops.run_layers(x.clone(), layers, 1e-5, kv, plan))
    assert torch.equal(*outputs) and bool(outputs[0].isfinite().all())


def test_windows_and_soft_caps_layer_by_layer(tmp_path: Path) -> None:
    """Gemma 2, of whose two layers one has a window: a prompt, then a decode step beside another prompt; in between,
    what the window has left is lost."""
    families.tiny_model("gemma2", layers=2).save_pretrained(tmp_path)
    checkpoint, logits = SafetensorsCheckpoint(tmp_path), []
    spec = checkpoint.spec()
    assert [layer.window for layer in spec.layers] == [20, 0] and spec.attention_softcap
    prompt = torch.randint(3, 300, (36,), generator=torch.Generator().manual_seed(5)).tolist()
    for ops in BACKENDS:
        model = Decoder(spec, build_weights(spec, checkpoint, ops), ops)
        kv = pools(model, 2)
        first = step(model, kv, [(0, 0, prompt)], 0)
        if ops.name == "triton":
            kv.keys[0][0] = kv.values[0][0] = float("nan")  # the prompt's first 16 tokens
        logits.append(torch.cat((first, step(model, kv, [(0, 36, [7]), (1, 0, prompt[:2])], 1))))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_triton_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^triton kernels cannot be had: torch sees no CUDA device$"):
        choose("triton", Sizes(64, 64, 96, 16), 1)


def test_heads_that_no_tile_serves_are_refused() -> None:
    ops = TritonOps(DEVICE, torch.float32)
    ops.check_heads(128, 32)
    TritonOps(DEVICE, torch.bfloat16).check_heads(256, 16)
    for dtype, heads in ((torch.float32, (256, 1)), (torch.bfloat16, (256, 17)), (torch.bfloat16, (320, 1))):
        with pytest.raises(ValueError, match=f"heads of {heads[0]} and {heads[1]} query heads"):
            TritonOps(DEVICE, dtype).check_heads(*heads)


def test_integers_move_in_one_piece_and_stay_aligned() -> None:
    ops = TritonOps(DEVICE, torch.float32)
    parts = [torch.arange(n, dtype=dtype) for n, dtype in ((5, torch.int32), (0, torch.int32), (7, torch.int64))]
    moved = ops._moved(*parts, torch.arange(6).view(2, 3))
    assert [part.tolist() for part in moved] == [list(range(5)), [], list(range(7)), [[0, 1, 2], [3, 4, 5]]]
    assert all((part.data_ptr() - moved[0].data_ptr()) % 16 == 0 for part in moved if part.numel())


def test_kernels_that_are_compiled_are_counted_beside_other_hooks() -> None:
    knobs, before, heard = triton.knobs.runtime, triton.knobs.runtime.jit_cache_hook, []
    try:
        knobs.jit_cache_hook = lambda **known: heard.append(known["repr"])
        ops = TritonOps(DEVICE, torch.float32)
        knobs.jit_cache_hook(repr="some_kernel")
        assert ops.compiles.num == 1 and heard == ["some_kernel"]
    finally:
        knobs.jit_cache_hook = before
