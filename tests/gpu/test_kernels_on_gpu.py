"""What only a GPU can show: bfloat16, pools of more than 2 ** 31 numbers, and that serving compiles nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import triton

from bench.kernels_gpu import Batch, error_of, prepare
from noria.kernels import reference
from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import Scores
from noria.kernels.triton_ops import TritonOps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = torch.device("cuda")


@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (16, 16, 96), (64, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_at_the_sizes_of_serving(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    if dtype == torch.float32 and heads[0] // heads[1] > 32:
        pytest.skip("no tile in float32")
    batch = Batch("mixed", [5000, 1, 513], [(0, 300), (700, 90)], heads)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    assert error_of(prepare(batch, GPU, dtype, most_layers=1)) < tolerance


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit floats")
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (16, 16, 96), (64, 1, 128)])
def test_attention_over_8_bit_floats(heads: tuple[int, int, int]) -> None:
    batch = Batch("mixed", [5000, 1, 513], [(0, 300), (700, 90)], heads)
    assert error_of(prepare(batch, GPU, torch.float16, most_layers=1, kept=torch.float8_e4m3fn)) < 2e-3


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit floats")
def test_8_bit_floats_are_written_as_torch_casts_them() -> None:
    ops, numbers = TritonOps(GPU, torch.bfloat16), torch.randn(64, 3 * 64) * torch.logspace(-4, 3, 192)
    kv, qkv = ops.new_kv_pools(1, 4, 16, 1, 64, torch.float8_e4m3fn), numbers.to(GPU, torch.bfloat16)
    layout = RaggedLayout.build([(0, 64, [0, 1, 2, 3])], 0, 16)
    still = torch.cat((torch.ones(64, 32), torch.zeros(64, 32)), dim=1)
    ops.rope_write_kv(qkv, kv, 0, ops.plan_step(layout, torch.arange(64), still, kv, 1, Scores(0.1)))
    for pool, part in ((kv.keys[0], qkv[:, 64:128]), (kv.values[0], qkv[:, 128:])):
        assert torch.equal(pool.view(64, 64).float(), part.float().clamp(-448, 448).to(pool.dtype).float())


def test_a_pool_may_hold_more_than_two_to_the_31_numbers() -> None:
    num_blocks, blocks = 2**31 // (16 * 8 * 128) + 8, 4
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    ops = TritonOps(GPU, torch.float16)
    kv = ops.new_kv_pools(1, num_blocks, 16, 8, 128, torch.float16)
    last = list(range(num_blocks - blocks, num_blocks))
    for pool in (kv.keys[0], kv.values[0]):
        pool[:blocks].fill_(float("nan"))  # where an index that has wrapped would read
        pool[-blocks:].normal_()
    q = torch.randn(3, 32, 128, dtype=torch.float16, device=GPU)
    layout = RaggedLayout.build([(60, 1, last), (50, 2, last)], 1, 16)
    plan = ops.plan_step(layout, torch.zeros(3, dtype=torch.int64), torch.zeros(1, 128), kv, 32, Scores(0.1))
    actual = ops.ragged_attention(q, kv, 0, plan).view(q.shape).cpu().double()
    near = RaggedLayout.build([(60, 1, [0, 1, 2, 3]), (50, 2, [0, 1, 2, 3])], 1, 16)
    pools = (kv.keys[0][-blocks:].cpu(), kv.values[0][-blocks:].cpu())
    exact = reference.ragged_attention(q.cpu(), *pools, near, 0.1, dtype=torch.float64)
    assert float((actual - exact).abs().max()) < 2e-3


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Names of the kernels that are compiled, or fetched from the disk, from here on."""
    found: list[str] = []
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **known: found.append(known["repr"])
    yield found
    triton.knobs.runtime.jit_cache_hook = before


def test_no_batch_compiles_anything_new_after_a_warm_up(compiles: list[str]) -> None:
    ops, chance = TritonOps(GPU, torch.bfloat16), random.Random(1)
    kv = ops.new_kv_pools(1, 128, 16, 2, 64, torch.bfloat16)

    def step(rows: list[tuple[int, int]], decode_rows: int) -> None:
        layout = RaggedLayout.build([(*row, list(range(-(-sum(row) // 16)))) for row in rows], decode_rows, 16)
        positions = torch.tensor([computed + i for computed, new in rows for i in range(new)])
        plan = ops.plan_step(layout, positions, torch.ones(2048, 64), kv, 6, Scores(0.1))
        qkv = torch.randn(len(positions), 10 * 64, dtype=torch.bfloat16, device=GPU)
        ops.silu_mul(ops.ragged_attention(ops.rope_write_kv(qkv, kv, 0, plan), kv, 0, plan))

    for rows, decode_rows in (([(0, 1)], 0), ([(1, 1)], 1), ([(1024, 1)], 1)):
        step(rows, decode_rows)
    assert compiles
    compiles.clear()
    for _ in range(30):
        decode = [(chance.randrange(2000), 1) for _ in range(chance.randrange(5))]
        step([*decode, *((chance.randrange(500), chance.randint(1, 80)) for _ in range(3))], len(decode))
    assert not compiles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_deterministic_linears_have_the_same_bits_at_any_place_of_any_batch(dtype: torch.dtype) -> None:
    ops = TritonOps(GPU, dtype, deterministic=True)
    packed = ops.pack_linear([torch.randn(1000, 576)])
    x = torch.randn(300, 576, dtype=dtype, device=GPU)
    whole, order = ops.linear(x, packed), torch.randperm(300, device=GPU)
    assert torch.equal(ops.linear(x[order], packed), whole[order])
    for count in (1, 7, 31, 64, 200):
        assert torch.equal(ops.linear(x[order[:count]], packed), whole[order[:count]])
