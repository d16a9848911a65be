"""Every backend against the plain reference in float64, and the promises about rows and mates."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noria.kernels import reference
from noria.kernels.choice import Sizes, choose
from noria.kernels.cpu import library, native_ops
from noria.kernels.layers import LayerForm, LayerWeights, Norm, run_layers
from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import Ops, Scores
from noria.kernels.pools import KVPools, kv_bytes_per_block
from noria.kernels.torch_ops import TorchOps
from noria.kernels.weights import GroupedWeight
from tests.kernels.ragged_rows import BLOCK_SIZE, make_rows, poisoned_pools, ragged_lengths

BACKENDS = {"torch": TorchOps(), "native": choose("native", Sizes(64, 64, 96, BLOCK_SIZE), threads=2)}


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]


def pools_with(ops: Ops, keys: Tensor, values: Tensor, dtype: torch.dtype = torch.float32) -> KVPools:
    """One layer of the backend's pools holding keys and values [blocks, block size, Hk, D]."""
    num_blocks, _, num_heads, dim = keys.shape
    kv = ops.new_kv_pools(1, num_blocks, BLOCK_SIZE, num_heads, dim, dtype)
    if ops.name == "native":
        keys, values = keys.permute(0, 2, 3, 1), values.permute(0, 2, 1, 3)
    kv.keys[0].copy_(keys)
    kv.values[0].copy_(values)
    return kv


def attend(ops: Ops, q: Tensor, kv: KVPools, layout: RaggedLayout, window: int = 0, softcap: float = 0.0) -> Tensor:
    positions, scores = torch.zeros(len(q), dtype=torch.int64), Scores(q.shape[2] ** -0.5, window, softcap)
    plan = ops.plan_step(layout, positions, torch.zeros(1, q.shape[2]), kv, q.shape[1], scores)
    return ops.ragged_attention(q, kv, 0, plan).view(q.shape)


@settings(max_examples=30, deadline=None)
@given(
    ragged_lengths(),
    st.sampled_from([(4, 4, 32), (9, 3, 64), (4, 1, 80), (16, 2, 128), (5, 1, 72), (8, 1, 8)]),
    st.sampled_from(["torch", "native", "native halves"]),
    st.sampled_from([0, 0, 1, 5, 16, 40]),
    st.sampled_from([0.0, 0.0, 0.5]),
)
def test_attention_equals_the_reference_and_reads_no_foreign_slot(
    ragged: tuple[list[tuple[int, int]], int], heads: tuple[int, int, int], backend: str, window: int, softcap: float
) -> None:
    (lengths, decode_rows), (query_heads, kv_heads, dim) = ragged, heads
    rows, num_blocks = make_rows(lengths)
    k_pool, v_pool = poisoned_pools(rows, num_blocks, kv_heads, dim)
    name, _, halves = backend.partition(" ")
    if halves:
        k_pool, v_pool = k_pool.half().float(), v_pool.half().float()
    layout = RaggedLayout.build(rows, decode_rows, BLOCK_SIZE)
    q = torch.randn(sum(new for _, new in lengths), query_heads, dim, generator=torch.Generator().manual_seed(3))
    expected = reference.ragged_attention(
        q, k_pool, v_pool, layout, dim**-0.5, window=window, softcap=softcap, dtype=torch.float64
    )
    kv = pools_with(BACKENDS[name], k_pool, v_pool, torch.float16 if halves else torch.float32)
    actual = attend(BACKENDS[name], q, kv, layout, window, softcap)
    assert actual.dtype == q.dtype
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


def test_reference_attention_of_one_key_is_its_value() -> None:
    rows, num_blocks = make_rows([(0, 1)])
    k_pool, v_pool = poisoned_pools(rows, num_blocks, 2, 8)
    layout = RaggedLayout.build(rows, 1, BLOCK_SIZE)
    attended = reference.ragged_attention(torch.randn(1, 4, 8), k_pool, v_pool, layout, 1.0)
    value = v_pool[rows[0][2][0], 0]  # [2, 8]
    torch.testing.assert_close(attended[0], value.repeat_interleave(2, dim=0))


@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (32, 0), (48, 0), (16, 20), (32, 3)])
def test_native_attention_has_the_same_bits_however_the_rows_are_cut(block_size: int, window: int) -> None:
    """As one prompt, in chunks, token by token, alone and among others."""
    ops, length, width = BACKENDS["native"], 70, (9 + 2 * 3) * 64
    qkv = torch.randn(length, width, generator=torch.Generator().manual_seed(5))
    angles = torch.randn(length, 64, generator=torch.Generator().manual_seed(6))
    blocks = [4, 2, 7, 1, 9][: -(-length // block_size)]

    def run(cuts: list[int], decode: bool, mate: bool) -> Tensor:
        kv, out = ops.new_kv_pools(1, 20, block_size, 3, 64, torch.float32), []
        for start, end in itertools.pairwise(cuts):
            rows = [(start, end - start, blocks)] + ([(start, end - start, [b + 10 for b in blocks])] if mate else [])
            layout = RaggedLayout.build(rows, len(rows) if decode else 0, block_size)
            positions = torch.arange(start, end).repeat(len(rows))
            plan = ops.plan_step(layout, positions, angles, kv, 9, Scores(0.125, window))
            q = ops.rope_write_kv(qkv[start:end].repeat(len(rows), 1), kv, 0, plan)
            out.append(ops.ragged_attention(q, kv, 0, plan)[: end - start])
        return torch.cat(out)

    whole = run([0, length], False, False)
    assert torch.equal(run([0, 1, 16, 17, 50, length], False, True), whole)
    assert torch.equal(run(list(range(length + 1)), True, False), whole)
    assert torch.equal(run(list(range(length + 1)), True, True), whole)


def test_a_decode_row_has_the_same_bits_alone_and_among_others() -> None:
    """In a process of its own, since MKL reads MKL_CBWR once, at its first use."""
    program = [sys.executable, "-c", _SAME_BITS]
    done = subprocess.run(program, env={**os.environ, "MKL_CBWR": "AUTO"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 9


_SAME_BITS = """
import torch
from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import Scores
from noria.kernels.torch_attention import plan_attention, ragged_attention

lengths = [38, 1, 501, 41, 512, 65, 64, 701, 10]
rows = [(length - 1, 1, list(range(45 * index, 45 * index + 45))) for index, length in enumerate(lengths)]
keys, values = torch.randn(45 * len(rows), 16, 3, 64), torch.randn(45 * len(rows), 16, 3, 64)
q = torch.randn(len(rows), 9, 64)
plan = plan_attention(RaggedLayout.build(rows, len(rows), 16), keys)
together = ragged_attention(q, keys, values, plan, Scores(0.125))
for index, row in enumerate(rows):
    plan = plan_attention(RaggedLayout.build([row], 1, 16), keys)
    alone = ragged_attention(q[index : index + 1], keys, values, plan, Scores(0.125))
    print(torch.equal(alone[0], together[index]))
"""


def test_an_empty_batch_gives_an_empty_result(ops: Ops) -> None:
    layout = RaggedLayout.build([], 0, BLOCK_SIZE)
    kv = ops.new_kv_pools(1, 2, BLOCK_SIZE, 3, 64, torch.float32)
    assert attend(ops, torch.empty(0, 9, 64), kv, layout).shape == (0, 9, 64)


def test_keys_are_rotated_and_found_where_the_layout_says(ops: Ops) -> None:
    rows, num_blocks = make_rows([(5, 1), (0, 40), (20, 3)])
    layout = RaggedLayout.build(rows, 1, BLOCK_SIZE)
    qkv, angles = torch.randn(44, (4 + 2 + 2) * 16), torch.randn(64, 8)
    positions = torch.tensor([5, *range(40), 20, 21, 22])
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    kv = ops.new_kv_pools(1, num_blocks, BLOCK_SIZE, 2, 16, torch.float32)
    heads, turned = qkv.view(44, 8, 16), (angles.cos()[positions], angles.sin()[positions])
    q, k, v = reference.rope(heads[:, :4], *turned), reference.rope(heads[:, 4:6], *turned), heads[:, 6:].clone()
    keys, values = torch.zeros(num_blocks, BLOCK_SIZE, 2, 16), torch.zeros(num_blocks, BLOCK_SIZE, 2, 16)
    reference.write_kv(k, v, keys, values, layout.slot_mapping)
    found = ops.rope_write_kv(qkv.clone(), kv, 0, ops.plan_step(layout, positions, table, kv, 4, Scores(1.0)))
    torch.testing.assert_close(found, q)
    wanted = pools_with(ops, keys, values)
    torch.testing.assert_close(kv.keys[0], wanted.keys[0])
    assert torch.equal(kv.values[0], wanted.values[0])
    torch.testing.assert_close(found.norm(dim=-1), heads[:, :4].norm(dim=-1))  # a rotation keeps lengths


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_elementwise_operations_equal_the_reference(ops: Ops, rows: int) -> None:
    x, weight = torch.randn(rows, 96) * 3, torch.randn(96)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x))
    # In float64: in float32 one plus a tanh near -1 loses all its digits.
    gelu = F.gelu(x[:, :48].double(), approximate="tanh") * x[:, 48:]
    torch.testing.assert_close(ops.gelu_mul(x).double(), gelu, rtol=1e-5, atol=5e-6)
    extreme = torch.tensor([[-1e30, -200.0, -87.4, -1e-30, 0.0, 1e-30, 88.0, 1e30] + [1.0] * 8])
    torch.testing.assert_close(ops.silu_mul(extreme), reference.silu_mul(extreme))
    gelu = F.gelu(extreme[:, :8], approximate="tanh")
    torch.testing.assert_close(ops.gelu_mul(extreme), gelu, rtol=1e-5, atol=1e-30)


def grouped(kind: str, out: int, width: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(out)
    group = 16 if kind == "q6_k" else 32
    scale = (torch.rand(out, width // group, generator=generator) + 0.5) / 16
    if kind in ("q4_1", "q8_0"):
        scale = scale.half().float()
    if kind.startswith("q4"):
        q = torch.randint(0, 16, (out, width), dtype=torch.uint8, generator=generator)
        minimum = (-7.5 * scale).half().float() if kind == "q4_1" else -7.3 * scale
        return GroupedWeight(q, scale, minimum, half_scales=kind == "q4_1")
    q = torch.randint(-127, 128, (out, width), dtype=torch.int8, generator=generator)
    return GroupedWeight(q, scale, None, kind == "q8_0")


def weight_of(kind: str, out: int, width: int) -> Tensor | GroupedWeight:
    if kind.startswith("q"):
        return grouped(kind, out, width)
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(out))
    return weight.to({"floats": torch.float32, "halves": torch.float16, "bfloats": torch.bfloat16}[kind]).float()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["floats", "halves", "bfloats", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_a_linear_row_has_the_same_bits_alone_and_among_others(ops: Ops, kind: str, bias: bool) -> None:
    parts = [weight_of(kind, 120, 96), weight_of(kind, 83, 96), weight_of("q8_0", 20, 96)]
    offset = torch.randn(223) if bias else None
    packed = ops.pack_linear(parts, offset)
    x = torch.randn(130, 96)
    product = ops.linear(x, packed)
    floats = torch.cat([part.floats() if isinstance(part, GroupedWeight) else part for part in parts])
    expected = reference.linear(x.double(), floats.double(), None if offset is None else offset.double())
    rounded = ops.name == "native"  # activations, to 16 bits where weights are integers
    assert float((product - expected).abs().max()) < (4e-5 if rounded else 2e-6) * float(expected.abs().max())
    assert ops.linear(x[:0], packed).shape == (0, 223)
    for count in (1, 2, 3, 5, 8, 17, 23, 24, 64):
        assert torch.equal(ops.linear(x[:count], packed), product[:count])
    base = torch.randn(130, 223)
    assert torch.equal(ops.linear(x, packed, add_to=base.clone()), product + base)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["floats", "halves", "bfloats", "q4_1", "q6_k"])
def test_layers_in_one_call_have_the_bits_of_their_operations(kind: str, threads: int) -> None:
    ops, hidden, ffn, dim = choose("native", Sizes(64, 32, 96, BLOCK_SIZE), threads), 64, 96, 32
    layers = [
        LayerWeights(
            Norm(torch.randn(hidden)),
            ops.pack_linear([weight_of(kind, 4 * dim, hidden), weight_of("q8_0", 2 * dim, hidden)], torch.randn(192)),
            ops.pack_linear([weight_of(kind, hidden, 2 * dim)]),
            Norm(torch.randn(hidden)),
            ops.pack_linear([weight_of(kind, 2 * ffn, hidden)]),
            ops.pack_linear([weight_of(kind, hidden, ffn)], torch.randn(hidden)),
        )
        for _ in range(3)
    ]
    rows, num_blocks = make_rows([(20, 1), (3, 1), (0, 37), (16, 5)])
    layout = RaggedLayout.build(rows, 2, BLOCK_SIZE)
    positions = torch.tensor([20, 3, *range(37), *range(16, 21)])
    x, angles = torch.randn(len(positions), hidden), torch.randn(64, dim)
    outputs = []
    for composed in (False, True):
        kv = ops.new_kv_pools(3, num_blocks, BLOCK_SIZE, 2, dim, torch.float16)
        plan = ops.plan_step(layout, positions, angles, kv, 2, Scores(0.125))
        if composed:
            outputs.append(run_layers(ops, x.clone(), layers, LayerForm(1e-5), kv, [plan] * 3))
        else:
            outputs.append(ops.run_layers(x.clone(), ops.pack_layers(layers), 1e-5, kv, plan))
    assert torch.equal(*outputs) and bool(outputs[0].isfinite().all())


def test_what_is_no_number_stays_so(ops: Ops) -> None:
    packed = ops.pack_linear([weight_of("q4_1", 20, 96)])
    x = torch.randn(4, 96)
    x[1, 3], x[2, 70], x[3] = float("nan"), float("inf"), 0.0
    product = ops.linear(x, packed)
    assert product[0].isfinite().all() and not product[1:3].isfinite().any() and not product[3].any()


@pytest.mark.parametrize("kind", ["floats", "halves", "bfloats", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_rows_of_a_table_are_its_values(ops: Ops, kind: str) -> None:
    weight = weight_of(kind, 83, 96)
    floats = weight.floats() if isinstance(weight, GroupedWeight) else weight
    ids = torch.tensor([0, 82, 5, 5, 16, 31])
    for head in (None, ops.pack_linear([weight])):
        assert torch.equal(ops.embed(ops.pack_table(weight, head), ids), floats[ids])


def test_the_plain_weight_is_the_fallback_of_torch() -> None:
    ops = TorchOps()
    packed = ops.pack_linear([torch.randn(20, 96)])
    plain = type(packed)(torch.randn(20, 96), None, 20, 96, packed=False)
    x = torch.randn(3, 96)
    torch.testing.assert_close(ops.linear(x, plain), reference.linear(x, plain.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kv_pools_take_the_bytes_that_are_told(ops: Ops, dtype: torch.dtype) -> None:
    pools = ops.new_kv_pools(3, 5, BLOCK_SIZE, 2, 8, dtype)
    held = sum(pool.numel() * pool.element_size() for pool in (*pools.keys, *pools.values))
    assert held == 5 * kv_bytes_per_block(3, BLOCK_SIZE, 2, 8, dtype)
    assert len(pools.keys) == len(pools.values) == 3


def test_the_choice_falls_back_to_torch_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    assert choose("auto", Sizes(64, 64, 96, 16), 1, said.append).name == "native" and not said
    assert choose("torch", Sizes(64, 64, 96, 16), 1).name == "torch"
    for sizes in (Sizes(60, 64, 96, 16), Sizes(64, 36, 96, 16), Sizes(64, 64, 96, 8)):
        assert choose("auto", sizes, 1, said.append).name == "torch"
        with pytest.raises(ValueError, match="native kernels cannot be had"):
            choose("native", sizes, 1)
    assert len(said) == 3
    with pytest.raises(ValueError, match="not known"):
        choose("cuda", Sizes(64, 64, 96, 16), 1)
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(library.Unavailable, match="no C compiler"):
        library.load(tmp_path)
    monkeypatch.setattr(library, "COMPILERS", ("false",))
    with pytest.raises(library.Unavailable, match="compiler failed"):
        library.load(tmp_path)
    monkeypatch.setattr(library.platform, "machine", lambda: "riscv64")
    with pytest.raises(library.Unavailable, match="riscv64"):
        library.load(tmp_path)
    assert native_ops.PAGE == 16 and not list(tmp_path.iterdir())


def test_a_library_is_built_once_and_found_again(tmp_path: Path) -> None:
    library.load(tmp_path)
    (built,) = tmp_path.iterdir()
    before = built.stat().st_mtime_ns
    library.load(tmp_path)
    assert built.stat().st_mtime_ns == before
