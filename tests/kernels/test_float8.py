"""8-bit floats: how they round, what their product is, and a model whose matrices they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import tiny_model
from noria.engine.config import EngineConfig
from noria.engine.execution.ragged import flatten
from noria.engine.execution.step import RowInput, StepInput
from noria.engine.models.load import load
from noria.engine.models.precision import Precision
from noria.engine.models.source import resolve
from noria.engine.plan import plan
from noria.kernels.float8 import float8_linear, to_float8
from noria.kernels.triton_ops import PackedLinear, TritonOps
from noria.kernels.weights import Float8Weight
from tests.kernels.triton_rows import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def test_a_number_is_off_by_a_sixteenth_at_most_and_a_row_has_its_own_scale() -> None:
    rows = noise(6, 64) * torch.tensor([1e-20, 1e-3, 1.0, 40.0, 1e6, 0.0])[:, None]
    values, scale = to_float8(rows)
    back, largest = values.float() * scale, rows.abs().amax(dim=1, keepdim=True)
    assert bool(((back - rows).abs() <= rows.abs() / 16 + largest / 448 / 512).all())
    assert torch.equal(back[5], torch.zeros(64))
    alone = to_float8(rows[3:4])
    assert torch.equal(alone[0].view(torch.uint8)[0], values.view(torch.uint8)[3]) and torch.equal(alone[1], scale[3:4])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this")
def test_the_product_is_that_of_the_rounded_numbers() -> None:
    x, weight, bias = noise(5, 64), noise(48, 64) * torch.logspace(-2, 2, 48)[:, None], noise(48)
    rounded, scale = to_float8(weight)
    own, mine = to_float8(x)
    exact = (own.double() * mine) @ (rounded.double() * scale).t() + bias
    found = float8_linear(x, rounded, scale.t().contiguous(), bias)
    assert float(((found - exact).abs() / exact.abs().amax(dim=0)).max()) < 1e-5
    unrounded = x.double() @ weight.double().t()
    assert float(((exact - bias - unrounded).norm(dim=0) / unrounded.norm(dim=0)).mean()) < 0.06
    assert float8_linear(x[:0], rounded, scale.t().contiguous(), bias).shape == (0, 48)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this")
def test_a_model_of_8_bit_floats_is_near_its_floats(tmp_path: Path) -> None:
    source, logits = resolve(str(tiny_model.make(tmp_path))), []
    step = StepInput([RowInput([5, 9, 8, 7, 30, 2], 0, [2], None)], 0)
    for precision in (Precision(), Precision(quantize="fp8")):
        ops = TritonOps(DEVICE, torch.float32)
        loaded = load(source, ops, precision=precision)
        model, spec = loaded.model, loaded.spec
        kv = ops.new_kv_pools(spec.num_layers, 3, 16, spec.num_kv_heads, spec.head_dim, torch.float32)
        batch = flatten(step, 16)
        logits.append(model.forward(batch.token_ids, batch.positions, kv, batch.layout, torch.arange(6)))
        layer: PackedLinear = model._weights.layers[0].qkv
        assert (layer.scale is None) == (precision == Precision()) and model._weights.head.scale is None
    assert not torch.equal(*logits)
    assert float(torch.nn.functional.cosine_similarity(*logits, dim=1).mean()) > 0.98


def test_rows_keep_their_scales_in_another_order() -> None:
    weight = Float8Weight(*to_float8(noise(4, 16) * torch.tensor([1.0, 10.0, 100.0, 1000.0])[:, None]))
    order = torch.tensor([2, 0, 3, 1])
    moved = weight.rows(lambda rows: rows.index_select(0, order))
    assert torch.equal(moved.floats(), weight.floats()[order]) and moved.shape == (4, 16)


def test_they_are_refused_in_one_line_where_they_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in ("native", "torch"):
        with pytest.raises(ValueError, match=f"^--quantize fp8 needs a GPU .* 9.0: {kernels} kernels have no fp8$"):
            plan(EngineConfig(kernels=kernels, quantize="fp8"))
