"""The operations against the plain reference in float64, and the promises about rows and mates."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noria.kernels import ops, reference
from noria.kernels.layout import RaggedLayout

BLOCK_SIZE = 16


def make_rows(lengths: list[tuple[int, int]], spare_blocks: int = 3) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Rows of (computed, new) with shuffled blocks of their own, and the number of blocks in the pool."""
    needed = [-(-(computed + new) // BLOCK_SIZE) for computed, new in lengths]
    num_blocks = sum(needed) + spare_blocks
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks)).tolist()
    rows = []
    for (computed, new), count in zip(lengths, needed, strict=True):
        rows.append((computed, new, [order.pop() for _ in range(count)]))
    return rows, num_blocks


def poisoned_pools(rows: list[tuple[int, int, list[int]]], num_blocks: int, heads: int, dim: int) -> list[Tensor]:
    """K and V pools that hold numbers where a row has tokens and NaN everywhere else."""
    pools = []
    for seed in (1, 2):
        pool = torch.full((num_blocks, BLOCK_SIZE, heads, dim), float("nan"))
        generator = torch.Generator().manual_seed(seed)
        for computed, new, blocks in rows:
            for position in range(computed + new):
                slot = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
                pool[slot] = torch.randn(heads, dim, generator=generator)
        pools.append(pool)
    return pools


@st.composite
def ragged_lengths(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Decode rows (one new token each), then prefill rows with or without a computed prefix."""
    decode = draw(st.lists(st.integers(0, 150).map(lambda computed: (computed, 1)), max_size=5))
    prefill = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 70)), max_size=4))
    return decode + prefill, len(decode)


@settings(max_examples=30, deadline=None)
@given(ragged_lengths(), st.sampled_from([(4, 4, 32), (9, 3, 64), (4, 1, 80)]))
def test_attention_equals_the_reference_and_reads_no_foreign_slot(
    ragged: tuple[list[tuple[int, int]], int], heads: tuple[int, int, int]
) -> None:
    (lengths, decode_rows), (query_heads, kv_heads, dim) = ragged, heads
    rows, num_blocks = make_rows(lengths)
    k_pool, v_pool = poisoned_pools(rows, num_blocks, kv_heads, dim)
    layout = RaggedLayout.build(rows, decode_rows, BLOCK_SIZE)
    q = torch.randn(sum(new for _, new in lengths), query_heads, dim, generator=torch.Generator().manual_seed(3))
    expected = reference.ragged_attention(q, k_pool, v_pool, layout, dim**-0.5, dtype=torch.float64)
    actual = ops.ragged_attention(q, k_pool, v_pool, layout, dim**-0.5)
    assert actual.shape == q.shape and actual.dtype == q.dtype
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


def test_reference_attention_of_one_key_is_its_value() -> None:
    rows, num_blocks = make_rows([(0, 1)])
    k_pool, v_pool = poisoned_pools(rows, num_blocks, 2, 8)
    layout = RaggedLayout.build(rows, 1, BLOCK_SIZE)
    attended = reference.ragged_attention(torch.randn(1, 4, 8), k_pool, v_pool, layout, 1.0)
    value = v_pool[rows[0][2][0], 0]  # [2, 8]
    torch.testing.assert_close(attended[0], value.repeat_interleave(2, dim=0))


def test_a_decode_row_has_the_same_bits_alone_and_among_others() -> None:
    """In a process of its own, since MKL reads MKL_CBWR once, at its first use."""
    program = [sys.executable, "-c", _SAME_BITS]
    done = subprocess.run(program, env={**os.environ, "MKL_CBWR": "AUTO"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 9


_SAME_BITS = """
import torch
from noria.kernels import ops
from noria.kernels.layout import RaggedLayout

lengths = [38, 1, 501, 41, 512, 65, 64, 701, 10]
rows = [(length - 1, 1, list(range(45 * index, 45 * index + 45))) for index, length in enumerate(lengths)]
keys, values = torch.randn(45 * len(rows), 16, 3, 64), torch.randn(45 * len(rows), 16, 3, 64)
q = torch.randn(len(rows), 9, 64)
together = ops.ragged_attention(q, keys, values, RaggedLayout.build(rows, len(rows), 16), 0.125)
for index, row in enumerate(rows):
    alone = ops.ragged_attention(q[index : index + 1], keys, values, RaggedLayout.build([row], 1, 16), 0.125)
    print(torch.equal(alone[0], together[index]))
"""


def test_an_empty_batch_gives_an_empty_result() -> None:
    layout = RaggedLayout.build([], 0, BLOCK_SIZE)
    pool = torch.zeros(2, BLOCK_SIZE, 3, 64)
    assert ops.ragged_attention(torch.empty(0, 9, 64), pool, pool, layout, 1.0).shape == (0, 9, 64)


def test_written_keys_are_found_where_the_layout_says() -> None:
    rows, num_blocks = make_rows([(5, 1), (0, 40), (20, 3)])
    layout = RaggedLayout.build(rows, 1, BLOCK_SIZE)
    k, v = torch.randn(44, 2, 8), torch.randn(44, 2, 8)
    pools = [torch.zeros(num_blocks, BLOCK_SIZE, 2, 8) for _ in range(4)]
    ops.write_kv(k, v, pools[0], pools[1], layout.slot_mapping)
    reference.write_kv(k, v, pools[2], pools[3], layout.slot_mapping)
    assert torch.equal(pools[0], pools[2]) and torch.equal(pools[1], pools[3])
    assert torch.equal(pools[0].flatten(0, 1)[reference.row_slots(layout, 1)], k[1:41])
    assert int((pools[0] != 0).any(dim=(2, 3)).sum()) == 44


def test_elementwise_operations_equal_the_reference() -> None:
    x, weight = torch.randn(7, 96), torch.randn(96)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x))
    heads, angles = torch.randn(7, 3, 32), torch.randn(7, 16)
    rotated = ops.rope(heads, angles.cos(), angles.sin())
    torch.testing.assert_close(rotated, reference.rope(heads, angles.cos(), angles.sin()))
    torch.testing.assert_close(rotated.norm(dim=-1), heads.norm(dim=-1))  # a rotation keeps lengths


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_row_has_the_same_bits_alone_and_among_others(bias: bool) -> None:
    weight, offset = torch.randn(200, 96), torch.randn(200) if bias else None
    packed = ops.pack_linear(weight, offset)
    x = torch.randn(130, 96)
    product = ops.linear(x, packed)
    expected = reference.linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-5)
    assert ops.linear(x[:0], packed).shape == (0, 200)
    if packed.packed:  # `F.linear`, the fallback, does not promise this
        for count in (1, 2, 3, 5, 8, 17, 64):
            assert torch.equal(ops.linear(x[:count], packed), product[:count])


def test_the_plain_weight_is_the_fallback() -> None:
    weight = torch.randn(20, 96, dtype=torch.float64)  # oneDNN packs float32 only
    packed = ops.pack_linear(weight)
    assert not packed.packed
    x = torch.randn(3, 96, dtype=torch.float64)
    torch.testing.assert_close(ops.linear(x, packed), reference.linear(x, weight))


def test_kv_pools_take_the_bytes_that_are_told() -> None:
    pools = ops.new_kv_pools(3, 5, BLOCK_SIZE, 2, 8)
    held = sum(pool.numel() * pool.element_size() for pool in (*pools.keys, *pools.values))
    assert held == 5 * ops.kv_bytes_per_block(3, BLOCK_SIZE, 2, 8)
    assert len(pools.keys) == len(pools.values) == 3 and pools.keys[0].shape == (5, BLOCK_SIZE, 2, 8)
