"""Rounding to integers: what is on the grid stays, what is not moves by half a step at most, groups do not mix."""

from __future__ import annotations

import pytest
import torch

from noria.kernels.quantize import GROUP, ROWS_AT_ONCE, SPANS, to_bytes, to_nibbles

ROUND = {"int8": to_bytes, "q4": to_nibbles}


def test_bytes_are_within_half_a_step() -> None:
    weight = torch.randn(ROWS_AT_ONCE + 5, 3 * GROUP) * torch.logspace(-4, 3, ROWS_AT_ONCE + 5)[:, None]
    rounded = to_bytes(weight)
    assert rounded.q.dtype == torch.int8 and rounded.minimum is None and rounded.half_scales
    assert torch.equal(rounded.scale, rounded.scale.half().float())
    step = rounded.scale.repeat_interleave(GROUP, dim=1)
    # Scales are halves themselves, so the largest value of a group may be 127 times their rounding off.
    rounding = (step / 2**11).clamp(min=2.0**-25)
    assert bool(((rounded.floats() - weight).abs() <= 0.5001 * step + 127 * rounding).all())


def test_nibbles_are_as_good_as_rounding_the_whole_range_and_mostly_better() -> None:
    weight = torch.randn(ROWS_AT_ONCE + 5, 3 * GROUP)
    rounded = to_nibbles(weight)
    assert rounded.q.dtype == torch.uint8 and int(rounded.q.max()) == 15 and rounded.minimum is not None
    groups = weight.view(len(weight), -1, GROUP)
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    steps = ((groups - lowest) / (highest - lowest) * 15).round()
    plain = (lowest + steps * (highest - lowest) / 15 - groups).square().sum(-1)
    error = (rounded.floats() - weight).view_as(groups).square().sum(-1)
    assert bool((error < 1.05 * plain + 1e-3).all())
    assert float(error.mean()) < 0.95 * float(plain.mean()) and SPANS[0] == 1


@pytest.mark.parametrize("kind", ["int8", "q4"])
def test_what_is_on_the_grid_stays(kind: str) -> None:
    steps = torch.randint(-127, 128, (7, GROUP)) if kind == "int8" else torch.randint(0, 16, (7, GROUP)) - 4
    steps[:, 0], steps[:, 1] = (127, -127) if kind == "int8" else (11, -4)
    weight = steps * torch.tensor([2.0**power for power in range(-8, -1)])[:, None]
    assert torch.equal(ROUND[kind](weight).floats(), weight)


@pytest.mark.parametrize("kind", ["int8", "q4"])
def test_groups_know_nothing_of_each_other_and_nothing_is_divided_by_zero(kind: str) -> None:
    weight = torch.zeros(3, 3 * GROUP)
    weight[1, GROUP : 2 * GROUP] = torch.linspace(-1000, 1000, GROUP)
    weight[2, :GROUP] = 0.25
    values = ROUND[kind](weight).floats()
    assert torch.equal(values[0], weight[0]) and not values[1, :GROUP].any() and not values[1, 2 * GROUP :].any()
    torch.testing.assert_close(values[2], weight[2], rtol=1e-3, atol=0)
    assert bool(ROUND[kind](torch.full((1, GROUP), 1e9)).floats().isfinite().all())
