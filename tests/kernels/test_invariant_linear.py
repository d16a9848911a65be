"""Linears whose bits do not depend on the batch: right, and the same alone, among others and on any grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.kernels.configs import LinearTile, linear_tile_for
from noria.kernels.invariant_linear import invariant_linear
from noria.kernels.triton_ops import TritonOps
from tests.kernels.triton_rows import DEVICE

EXAMPLES = settings().max_examples // 20
TILES = [LinearTile(16, 32, 16, 4, 2), LinearTile(64, 16, 64, 4, 2)]


@settings(max_examples=EXAMPLES)
@given(
    tokens=st.integers(0, 70),
    sizes=st.sampled_from([(576, 96), (40, 33), (64, 1), (100, 130)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    tile=st.sampled_from(TILES),
    biased=st.booleans(),
    programs=st.integers(1, 9),
)
def test_it_is_the_product(
    tokens: int, sizes: tuple[int, int], dtype: torch.dtype, tile: LinearTile, biased: bool, programs: int
) -> None:
    inputs, outputs = sizes
    x, weight, bias = (
        torch.randn(*shape).to(DEVICE, dtype) for shape in ((tokens, inputs), (outputs, inputs), (outputs,))
    )
    found = invariant_linear(x, weight, bias if biased else None, tile, programs)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert found.dtype == dtype and found.shape == (tokens, outputs)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * inputs**0.5)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    ops, plain = TritonOps(DEVICE, torch.float32, deterministic=True), TritonOps(DEVICE, torch.float32)
    packed = ops.pack_linear([torch.randn(50, 96), torch.randn(30, 96)], torch.randn(80))
    x = torch.randn(130, 96, device=DEVICE)
    whole = ops.linear(x, packed)
    torch.testing.assert_close(whole, plain.linear(x, packed), rtol=1e-5, atol=1e-5)
    for count in (1, 2, 31, 64, 129):  # at their places: the interpreter's products depend on those
        assert torch.equal(ops.linear(x[:count], packed), whole[:count])
    tile = linear_tile_for(90, 4)
    for programs in (1, 3, 132):
        assert torch.equal(invariant_linear(x, packed.weight, packed.bias, tile, programs), whole)
    base = torch.randn(130, 80, device=DEVICE)
    assert torch.equal(ops.linear(x, packed, add_to=base.clone()), base + whole)


def test_devices_have_a_tile_or_are_refused() -> None:
    assert linear_tile_for(90, 2) != linear_tile_for(86, 2) == linear_tile_for(80, 2)
    assert linear_tile_for(120, 2) == linear_tile_for(90, 2)
    assert linear_tile_for(90, 4) == linear_tile_for(80, 4)
    with pytest.raises(ValueError, match=r"8\.0, not 7\.5"):
        linear_tile_for(75, 2)
