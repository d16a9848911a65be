"""Keys and values kept as 8-bit floats: how they are written and read, a model over them, where they are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench import tiny_model
from noria.engine import plan as planning
from noria.engine.config import EngineConfig
from noria.engine.memory import Room
from noria.engine.models.load import load
from noria.engine.models.source import resolve
from noria.engine.plan import plan
from noria.kernels import elementwise, torch_ops
from noria.kernels.configs import FLOAT8_TABLE, TABLE, Tile, tile_for
from noria.kernels.layout import RaggedLayout
from noria.kernels.torch_ops import TorchOps
from noria.kernels.triton_ops import TritonOps
from tests.engine.models.ragged_steps import BLOCKS_PER_ROW, step
from tests.kernels.ragged_rows import BLOCK_SIZE, make_rows, poisoned_pools
from tests.kernels.triton_rows import DEVICE, attend, expected

FLOAT8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}  # of the same rounded keys and values: as of others
EXAMPLES = max(1, settings().max_examples // 30)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def rounded(values: Tensor) -> Tensor:
    return values.float().clamp(-448, 448).to(FLOAT8).to(values.dtype)


@settings(max_examples=EXAMPLES)
@given(
    st.lists(st.integers(0, 150), max_size=3),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=2),
    st.sampled_from([(3, 1, 64), (8, 2, 128), (2, 2, 80)]),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([0, 0, 40]),
    st.sampled_from([0.0, 20.0]),
)
def test_attention_equals_the_reference_over_the_same_rounded_numbers(
    contexts: list[int],
    prompts: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    softcap: float,
) -> None:
    """What belongs to no row is NaN, which Triton's interpreter reads as 480: as much of a poison."""
    lengths, (num_heads, kv_heads, dim) = [(computed, 1) for computed in contexts] + prompts, heads
    placed, num_blocks = make_rows(lengths)
    pools = [pool.to(FLOAT8) for pool in poisoned_pools(placed, num_blocks, kv_heads, dim)]
    layout = RaggedLayout.build(placed, len(contexts), BLOCK_SIZE)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(sum(new for _, new in lengths), num_heads, dim, generator=generator).to(dtype)
    tiles = {"decode": Tile(16, 64, 4, 2), "prefill": Tile(32, 32, 4, 2)}
    actual = attend(q, pools, layout, **tiles, split=64, window=window, softcap=softcap)
    wanted = expected(q, pools, layout, window, softcap)
    assert float((actual.double() - wanted).abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("sm", "dim"), [(90, 64), (89, 80)])
def test_tiles_of_their_table_compute_the_reference(sm: int, dim: int) -> None:
    placed, num_blocks = make_rows([(1090, 1), (100, 1), (90, 50)])
    pools = [pool.to(FLOAT8) for pool in poisoned_pools(placed, num_blocks, 1, dim)]
    layout = RaggedLayout.build(placed, 2, BLOCK_SIZE)
    q = torch.randn(52, 3, dim, generator=torch.Generator().manual_seed(3)).half()
    decode, prefill = (tile_for(sm, dim, 3, phase, 2, 1) for phase in ("decode", "prefill"))
    actual = attend(q, pools, layout, decode=decode, prefill=prefill, split=512)
    assert float((actual.double() - expected(q, pools, layout)).abs().max()) < 2e-3


def test_they_have_tiles_for_all_heads_and_from_8_9_on() -> None:
    assert {(max(sm, 89), *rest) for sm, *rest in TABLE} == set(FLOAT8_TABLE)
    assert tile_for(100, 128, 8, "decode", 2, 1) == FLOAT8_TABLE[90, 128, 16, "decode"]
    with pytest.raises(ValueError, match=r"no tile for compute capability 8\.6"):
        tile_for(86, 128, 8, "decode", 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_they_are_written_as_torch_casts_them_and_the_largest_is_kept(dtype: torch.dtype) -> None:
    halves = torch.arange(126, dtype=torch.uint8).view(FLOAT8).float()
    ties = (halves + torch.arange(1, 127, dtype=torch.uint8).view(FLOAT8).float()) / 2
    spread = torch.randn(700, generator=torch.Generator().manual_seed(1)) * torch.logspace(-5, 3.5, 700)
    numbers = torch.cat((ties, -ties, spread, torch.tensor([448.0, 464.0, 465.0, -6e4, 0.0, 1e-30])))
    numbers = torch.cat((numbers, numbers.new_zeros(-len(numbers) % 64))).view(-1, 64).to(dtype)
    tokens = len(numbers)
    qkv = torch.cat((numbers, numbers, numbers.flip(0)), dim=1).to(DEVICE)  # one head each
    still = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1).to(DEVICE)
    slots = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    pools = [torch.zeros(-(-tokens // 16), 16, 1, 64, dtype=FLOAT8, device=DEVICE) for _ in range(2)]
    queries = elementwise.rope_write_kv(qkv, still, torch.zeros_like(slots), slots, *pools)
    assert torch.equal(queries.flatten(1).cpu(), numbers)
    for pool, given_ in zip(pools, (numbers, numbers.flip(0)), strict=True):
        assert torch.equal(pool.view(-1, 64)[:tokens].float().cpu(), rounded(given_).float())


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this")
def test_a_model_over_them_computes_what_plain_torch_does_with_rounded_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, then a decode row beside more of a prompt, whose first block was computed before."""
    plain, source, logits = torch_ops.write_kv, resolve(str(tiny_model.make(tmp_path))), []
    monkeypatch.setattr(torch_ops, "write_kv", lambda k, v, *rest: plain(rounded(k), rounded(v), *rest))
    for ops, kept in ((TorchOps(), torch.float32), (TritonOps(DEVICE, torch.float32), FLOAT8)):
        model = load(source, ops).model
        spec = model.spec
        kv = ops.new_kv_pools(spec.num_layers, 2 * BLOCKS_PER_ROW, 16, spec.num_kv_heads, spec.head_dim, kept)
        assert kv.keys[0].dtype == kept
        first = step(model, kv, [(0, 0, list(range(20, 38))), (1, 0, list(range(30, 46)))], 0)
        logits.append(torch.cat((first, step(model, kv, [(0, 18, [7]), (1, 16, [9, 8])], 1))))
    assert float(torch.nn.functional.cosine_similarity(*logits, dim=1).min()) > 0.999


def test_they_are_refused_in_one_line_where_they_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in ("native", "torch"):
        with pytest.raises(ValueError, match=f"^--kv-dtype fp8 needs a GPU .* 8.9: {kernels} kernels have no fp8$"):
            plan(EngineConfig(kernels=kernels, kv_dtype="fp8"))
    on_gpu(monkeypatch, (8, 6))
    with pytest.raises(ValueError, match=r"^--kv-dtype fp8 needs a GPU of compute capability 8.9: this one has 8.6$"):
        plan(EngineConfig(kv_dtype="fp8"))
    on_gpu(monkeypatch, (8, 9))
    with pytest.raises(ValueError, match=r"^--kv-dtype fp8 goes with bf16 or fp16: leave --dtype fp32 away$"):
        plan(EngineConfig(kv_dtype="fp8", dtype="fp32"))


def test_the_memory_holds_twice_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (9, 0))
    kept = [plan(EngineConfig(kv_memory="64MiB", kv_dtype=kind)) for kind in ("auto", "fp8")]
    assert [planned.kv_dtype for planned in kept] == [torch.bfloat16, FLOAT8]
    assert kept[1].num_blocks == 2 * kept[0].num_blocks and kept[1].kv_tokens == 2 * kept[0].kv_tokens


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A plan is made as if there were a GPU: it asks what computes for its name and its device alone."""
    ops = SimpleNamespace(name="triton", device=torch.device("cuda"), deterministic=False)
    monkeypatch.setattr(planning, "choose", lambda *_: ops)
    monkeypatch.setattr(planning, "_gpu_room", lambda _: Room(2**34, share=0.9, limit=2**34))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
