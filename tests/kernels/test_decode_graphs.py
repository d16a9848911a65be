"""Steps over fixed places, launched again and again: the bits of the ordinary way, padding that touches no page, and
who goes which way. The kernels run in Triton's interpreter, and a graph is its launches one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench import tiny_model
from noria.engine.execution import decode_graphs
from noria.engine.execution.decode_graphs import DecodeGraphs, EagerGraphs
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.step import Pooling, RowInput, Sampling, StepInput
from noria.engine.models.decoder import Decoder
from noria.engine.models.load import load
from noria.engine.models.source import resolve
from noria.engine.wire.messages import SamplingParams
from noria.kernels.decode_buffers import DecodeBuffers
from noria.kernels.layout import RaggedLayout
from noria.kernels.pools import KVPools
from noria.kernels.triton_ops import TritonOps
from tests.kernels.triton_rows import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
GREEDY = Sampling(SamplingParams(max_tokens=9, temperature=0.0), 0)
WARM = Sampling(SamplingParams(max_tokens=9, temperature=0.9, seed=5, top_k=20), 3)
NUM_BLOCKS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Deterministic, so that a row's bits do not depend on how many are beside it."""
    source = resolve(str(tiny_model.make(tmp_path_factory.mktemp("model"))))
    found = load(source, TritonOps(DEVICE, torch.float32, deterministic=True)).model
    assert isinstance(found, Decoder)
    return found


def pools(model: Decoder) -> KVPools:
    """Numbers in the pages of the rows, NaN in all others."""
    spec = model.spec
    kv = model.ops.new_kv_pools(spec.num_layers, NUM_BLOCKS, 16, spec.num_kv_heads, spec.head_dim, torch.float32)
    noise = torch.Generator().manual_seed(1)
    for pool in (*kv.keys, *kv.values):
        pool.fill_(torch.nan)
        pool[[2, 5, 6]] = torch.randn(3, *pool.shape[1:], generator=noise).to(pool.device)
    return kv


def bits(kv: KVPools) -> list[Tensor]:
    return [pool.view(torch.int32).clone() for pool in (*kv.keys, *kv.values)]


def decode_step(*sampling: Sampling) -> StepInput:
    places = [([5], 6, [2]), ([7], 20, [5, 6]), ([9], 3, [2])]
    rows = [RowInput(*place, some) for place, some in zip(places, sampling, strict=False)]
    return StepInput(rows, len(rows))


def graphs_of(model: Decoder, kv: KVPools, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> DecodeGraphs:
    monkeypatch.setattr(decode_graphs, "SIZES", (1, 4))
    monkeypatch.setattr(decode_graphs, "LENGTHS", (16,))
    return DecodeGraphs(model, kv, EagerGraphs(), **{"max_rows": 4, "max_len": 64} | limits)


def test_a_graph_computes_the_bits_of_the_ordinary_way_and_padding_touches_no_page(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_pools, pools_of_graphs = pools(model), pools(model)
    graphs = graphs_of(model, pools_of_graphs, monkeypatch)
    assert all(map(torch.equal, bits(plain_pools), bits(pools_of_graphs)))  # making them wrote nothing
    plain, replayed = ModelRunner(model, plain_pools, 16), ModelRunner(model, pools_of_graphs, 16, graphs=graphs)
    ran: list[tuple[int, int]] = []
    monkeypatch.setattr(graphs, "run", lambda size, batch, run=graphs.run: ran.append(size) or run(size, batch))
    for step in (decode_step(GREEDY, GREEDY, GREEDY), decode_step(GREEDY), decode_step(WARM, GREEDY)):
        batch = plain.flatten(step)
        logits = model.forward(batch.token_ids, batch.positions, plain_pools, batch.layout, batch.logit_rows)
        assert replayed.execute(step) == plain.execute(step)
        assert all(map(torch.equal, bits(plain_pools), bits(pools_of_graphs)))
        if step.rows[0].sampling is GREEDY:  # a draw writes over the logits that it has adjusted
            assert torch.equal(graphs._logits[: len(step.rows)].cpu(), logits)
    assert ran == [(4, 64), (1, 16), (4, 64)]


def test_steps_of_another_kind_go_the_ordinary_way(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeGraphs, "_launches", lambda self, rows: lambda: None)
    graphs = graphs_of(model, pools(model), monkeypatch)
    decode = RowInput([5], 6, [2], GREEDY)
    assert graphs.size_for(StepInput([decode] * 2, 2)) == (4, 16)
    assert graphs.size_for(StepInput([RowInput([5], 16, [2, 3], GREEDY)], 1)) == (1, 64)
    prompt = RowInput([5], 0, [2], GREEDY)
    others = [
        StepInput([], 0),
        StepInput([decode, prompt], 1),  # a prompt of one token belongs to the prompts' kernel
        StepInput([decode] * 5, 5),
        StepInput([RowInput([5], 64, [2] * 5, GREEDY)], 1),
        StepInput([RowInput([5, 6], 6, [2], GREEDY, draft=[GREEDY])], 1),
        StepInput([RowInput([5], 6, [2], GREEDY, adapter="a")], 1),
        StepInput([RowInput([5], 6, [2], GREEDY, prompt_targets=[1])], 1),
        StepInput([RowInput([5], 6, [2], None, pooling=Pooling("mean"))], 1),
    ]
    assert [graphs.size_for(step) for step in others] == [None] * len(others)


def test_sizes_reach_to_the_batch_and_no_further(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeGraphs, "_launches", lambda self, rows: lambda: None)
    for most, last in ((1, 1), (3, 4), (64, 64), (65, 96), (4096, 256)):
        found = DecodeGraphs(model, pools(model), EagerGraphs(), max_rows=most, max_len=100)
        assert found.sizes[-1] == last and found.lengths == (100,)
    assert DecodeGraphs(model, pools(model), EagerGraphs(), max_rows=1, max_len=40_000).lengths == (4096, 32768, 40_000)


def test_buffers_hold_a_step_and_padding_for_each_group_of_layers() -> None:
    rows = DecodeBuffers.build(5, 40, 16, DEVICE, num_groups=2)
    parts = [(17, 1, [3, 6, 4, 7]), (0, 1, [1, 2])]
    layout = RaggedLayout.build(parts, 2, 16, 2)
    for _ in range(2):  # the second time over what is there
        rows.fill(torch.tensor([8, 9]), torch.tensor([17, 0]), layout)
    assert rows.token_ids.tolist() == [8, 9, 0, 0, 0] and rows.positions.tolist() == [17, 0, 0, 0, 0]
    assert rows.kv_lens.tolist() == [18, 1, 0, 0, 0]
    assert [slots.tolist() for slots in rows.slots] == [[65, 16, -1, -1, -1], [113, 32, -1, -1, -1]]
    assert [table[:2].tolist() for table in rows.tables] == [[[3, 4, 0], [1, 0, 0]], [[6, 7, 0], [2, 0, 0]]]
    parts_of_it = (rows.token_ids, rows.positions, rows.kv_lens, *rows.slots, *rows.tables)
    assert all((part.data_ptr() - rows.on_device.data_ptr()) % 16 == 0 for part in parts_of_it)
