"""The Triton attention kernels against the reference in float64, and the promises about rows, mates and chunks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noria.kernels.configs import Tile, tile_for
from noria.kernels.layout import RaggedLayout
from tests.kernels.ragged_rows import BLOCK_SIZE, make_rows, poisoned_pools
from tests.kernels.triton_rows import DEVICE, attend, expected

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
EXAMPLES = settings().max_examples // 8
SMALL = {"decode": Tile(16, 32, 4, 2), "prefill": Tile(16, 32, 4, 2), "split": 64}

# A tile's unused rows divide nothing by nothing; they are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")


@st.composite
def ragged(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Decode rows, then prompts with or without a computed prefix, as (computed, new)."""
    decode = draw(st.lists(st.integers(0, 150).map(lambda computed: (computed, 1)), max_size=3))
    prefill = draw(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=2 + (not decode)))
    return (decode + prefill or [(0, 1)]), len(decode)


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    kv_heads = draw(st.integers(1, 2))
    return kv_heads * draw(st.sampled_from([1, 3, 4, 8])), kv_heads, draw(st.sampled_from([32, 64, 80, 96, 128]))


def random_queries(num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, num_heads, dim, generator=torch.Generator().manual_seed(3)).to(dtype)


@settings(max_examples=EXAMPLES)
@given(
    ragged(),
    head_counts(),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([0, 0, 1, 7, 40]),
    st.sampled_from([0.0, 0.0, 20.0]),
    st.sampled_from([(32, 32), (64, 32), (64, 64), (128, 16), (512, 64)]),
    st.sampled_from([16, 32, 64]),
)
def test_attention_equals_the_reference_and_reads_no_foreign_slot(
    rows: tuple[list[tuple[int, int]], int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    softcap: float,
    split_and_width: tuple[int, int],
    height: int,
) -> None:
    (lengths, decode_rows), (num_heads, kv_heads, dim) = rows, heads
    placed, num_blocks = make_rows(lengths)
    pools = [pool.to(dtype) for pool in poisoned_pools(placed, num_blocks, kv_heads, dim)]
    layout = RaggedLayout.build(placed, decode_rows, BLOCK_SIZE)
    q = random_queries(sum(new for _, new in lengths), num_heads, dim, dtype)
    split, width = split_and_width
    tiles = {"decode": Tile(16, width, 4, 2), "prefill": Tile(height, width, 4, 2)}
    actual = attend(q, pools, layout, **tiles, split=split, window=window, softcap=softcap)
    error = float((actual.double() - expected(q, pools, layout, window, softcap)).abs().max())
    assert error < TOLERANCE[dtype]


@settings(max_examples=max(1, EXAMPLES // 3))
@given(ragged(), st.sampled_from([1, 7, 17, 40]), st.sampled_from([0.0, 20.0]), st.sampled_from([16, 32, 64]))
def test_pages_that_a_window_has_left_are_not_read(
    rows: tuple[list[tuple[int, int]], int], window: int, softcap: float, height: int
) -> None:
    """They may have been given to others: their numbers are NaN, and their entries in the block table are no blocks."""
    lengths, decode_rows = rows
    placed, num_blocks = make_rows(lengths)
    pools = poisoned_pools(placed, num_blocks, 1, 32)
    q, layout = (
        random_queries(sum(new for _, new in lengths), 3, 32),
        RaggedLayout.build(placed, decode_rows, BLOCK_SIZE),
    )
    wanted = expected(q, pools, layout, window, softcap)
    for row, (computed, _, blocks) in enumerate(placed):
        for place in range(max(computed + 1 - window, 0) // BLOCK_SIZE):
            layout.block_table[row, place] = -(2**30)
            for pool in pools:
                pool[blocks[place]] = float("nan")
    tiles = {"decode": Tile(16, 64, 4, 2), "prefill": Tile(height, 64, 4, 2)}
    actual = attend(q, pools, layout, **tiles, split=64, window=window, softcap=softcap)
    assert float((actual.double() - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("sm", "dtype"), [(90, torch.float32), (80, torch.float16), (90, torch.float16), (90, torch.bfloat16)]
)
def test_tiles_of_the_table_compute_the_reference(sm: int, dtype: torch.dtype) -> None:
    """With splits of 512 keys. The interpreter cannot multiply bfloat16: there it is widened first."""
    lengths, dim = [(1090, 1), (511, 1), (100, 1), (90, 50)], 80
    placed, num_blocks = make_rows(lengths)
    pools = [pool.to(dtype) for pool in poisoned_pools(placed, num_blocks, 1, dim)]
    layout, q = RaggedLayout.build(placed, 3, BLOCK_SIZE), random_queries(53, 3, dim, dtype)
    decode, prefill = (tile_for(sm, dim, 3, phase, dtype.itemsize) for phase in ("decode", "prefill"))
    upcast = dtype == torch.bfloat16
    actual = attend(q, pools, layout, decode=decode, prefill=prefill, split=512, upcast=upcast)
    error = float((actual.double() - expected(q, pools, layout)).abs().max())
    assert error < {torch.bfloat16: 2e-2, **TOLERANCE}[dtype]


def test_a_wide_group_has_a_tall_tile() -> None:
    placed, num_blocks = make_rows([(40, 1), (9, 5)])
    pools, layout = poisoned_pools(placed, num_blocks, 1, 32), RaggedLayout.build(placed, 1, BLOCK_SIZE)
    q = random_queries(6, 20, 32)
    decode, prefill = (tile_for(90, 32, 20, phase, 4) for phase in ("decode", "prefill"))
    assert decode.block_m == 32
    actual = attend(q, pools, layout, decode=decode, prefill=prefill, split=512)
    assert float((actual.double() - expected(q, pools, layout)).abs().max()) < 1e-5


def test_a_padding_row_touches_nothing() -> None:
    placed, num_blocks = make_rows([(200, 1)])
    pools, layout = poisoned_pools(placed, num_blocks, 2, 32), RaggedLayout.build(placed, 1, BLOCK_SIZE)
    padded = RaggedLayout(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([201, 0], dtype=torch.int32),
        torch.cat((layout.block_table, torch.full_like(layout.block_table, 2**30))),
        layout.slot_mapping,
        decode_rows=2,
        block_size=BLOCK_SIZE,
    )
    q = random_queries(2, 4, 32)
    out = attend(q, pools, padded, **SMALL)
    assert bool(out[1].isnan().all())
    assert float((out[:1].double() - expected(q[:1], pools, layout)).abs().max()) < 1e-5


# --- the same bits ---------------------------------------------------------------------------------------------------


def test_a_row_has_the_same_bits_alone_among_others_and_in_any_order() -> None:
    lengths = [(90, 1), (3, 1), (130, 1), (40, 9), (0, 17), (70, 1)]  # the last is a prompt of one token
    placed, num_blocks = make_rows(lengths)
    pools, q = poisoned_pools(placed, num_blocks, 1, 64), random_queries(30, 3, 64)
    starts = [0, *itertools.accumulate(new for _, new in lengths)]

    def run(order: list[int]) -> list[Tensor]:
        layout = RaggedLayout.build([placed[i] for i in order], sum(i < 3 for i in order), BLOCK_SIZE)
        parts = torch.cat([q[starts[i] : starts[i + 1]] for i in order])
        out = attend(parts, pools, layout, **SMALL, window=25)
        return list(out.split([lengths[i][1] for i in order]))

    together = run([0, 1, 2, 3, 4, 5])
    for order in ([2, 0, 1, 5, 4, 3], [1, 1, 4, 3], [2], [5]):
        for row, attended in zip(order, run(order), strict=True):
            assert torch.equal(attended, together[row]), (row, order)


@pytest.mark.parametrize("window", [0, 25])
def test_a_prompt_has_the_same_bits_however_it_is_cut(window: int) -> None:
    """In the interpreter where cuts keep queries at their places in a tile: numpy's products round by the place."""
    length, blocks = 75, [4, 2, 7, 1, 9]
    pools, q = poisoned_pools([(0, length, blocks)], 12, 1, 64), random_queries(length, 3, 64)

    def run(cuts: list[int]) -> Tensor:
        pieces = []
        for start, end in itertools.pairwise(cuts):
            layout = RaggedLayout.build([(start, end - start, blocks)], 0, BLOCK_SIZE)
            pieces.append(attend(q[start:end], pools, layout, **SMALL, window=window))
        return torch.cat(pieces)

    whole = run([0, length])
    assert SMALL["prefill"].queries_at_once(3) == 5
    for cuts in ([0, 5, 30, 65, 75], [0, 35, 70, 75], *([[0, 1, 33, 64, 75]] if DEVICE.type == "cuda" else [])):
        assert torch.equal(run(cuts), whole), cuts
