"""Norm, rotary positions with the write of keys and values, and the gate, in Triton, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noria.kernels import elementwise, reference
from tests.kernels.triton_rows import DEVICE

EXAMPLES = settings().max_examples // 20
DTYPES = st.sampled_from([torch.float32, torch.float16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}  # a half of 4 to 8 is rounded by 4e-3 at most


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.cpu(), rtol=tolerance / 4, atol=tolerance)


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 5), st.sampled_from([1, 48, 64, 576, 1000]), DTYPES, st.booleans())
def test_the_norm_is_of_the_sum_that_it_leaves_behind(tokens: int, width: int, dtype: torch.dtype, add: bool) -> None:
    x, delta, weight = random(tokens + 1, width, dtype=dtype)[1:], random(tokens, width, dtype=dtype), random(width)
    total = x + delta if add else x.clone()
    normed = elementwise.rms_norm(x, weight.to(dtype), 1e-5, delta if add else None)
    assert torch.equal(x, total)
    close(normed, reference.rms_norm(total.double(), weight.to(dtype).double(), 1e-5))


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 4), st.sampled_from([1, 96, 1500]), DTYPES)
def test_the_gate(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 3 * random(tokens, 2 * width, dtype=dtype)
    close(elementwise.silu_mul(gate_up), reference.silu_mul(gate_up.double()))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_the_gate_of_large_numbers_is_no_nan() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE)
    assert elementwise.silu_mul(gate_up).tolist() == [[0.0, 600.0]]


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from([(4, 2, 32), (9, 3, 64), (3, 1, 80), (8, 8, 96)]),
    st.lists(st.integers(0, 63), max_size=5, unique=True),
    DTYPES,
    st.sampled_from([torch.float32, torch.float16]),
)
def test_queries_and_keys_are_rotated_and_written_where_they_belong(
    heads: tuple[int, int, int], slots: list[int], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    (num_heads, kv_heads, dim), tokens = heads, len(slots)
    qkv, angles = random(tokens, (num_heads + 2 * kv_heads) * dim, dtype=dtype), random(100, dim)
    positions = torch.tensor([7 * i % 100 for i in slots], dtype=torch.int32, device=DEVICE)
    where = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    if tokens:
        where[0] = -1  # padding
    pools = [random(4, 16, kv_heads, dim, dtype=kv_dtype) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    queries = elementwise.rope_write_kv(qkv, angles, positions, where, *pools)
    cos, sin = angles[positions.long()].double().chunk(2, dim=1)
    split = qkv.double().view(tokens, num_heads + 2 * kv_heads, dim)
    rotated = reference.rope(split[:, : num_heads + kv_heads], cos, sin)
    close(queries, rotated[:, :num_heads])
    kept = torch.tensor(slots[1:], dtype=torch.int64, device=DEVICE)
    for pool, old, new in zip(pools, before, (rotated[:, num_heads:], split[:, num_heads + kv_heads :]), strict=True):
        written = pool.flatten(0, 1)
        torch.testing.assert_close(written[kept].double(), new[1:], rtol=3e-3, atol=1e-2)
        untouched = torch.ones(64, dtype=torch.bool, device=DEVICE).index_fill_(0, kept, False)
        assert torch.equal(written[untouched], old.flatten(0, 1)[untouched])


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_token_has_the_same_bits_whoever_its_mates_are(tokens: int) -> None:
    x, gate_up = random(5, 576), random(5, 192)
    weight = random(576)
    assert torch.equal(elementwise.rms_norm(x[:tokens], weight, 1e-5), elementwise.rms_norm(x, weight, 1e-5)[:tokens])
    assert torch.equal(elementwise.silu_mul(gate_up[:tokens]), elementwise.silu_mul(gate_up)[:tokens])
