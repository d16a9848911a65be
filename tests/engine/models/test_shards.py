"""A model divided over ranks gives what it gives as a whole: stages, shards and both, in threads over gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from transformers import LlamaConfig, LlamaForCausalLM

from noria.engine.execution.data_channel import DataChannel
from noria.engine.models.build import Checkpoint, tensor_names
from noria.engine.models.decoder import Decoder
from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_groups import read_groups
from noria.engine.models.load import build_decoder
from noria.engine.models.safetensors_checkpoint import SafetensorsCheckpoint
from noria.engine.models.shards import ShardedCheckpoint, Shares
from noria.engine.models.source import resolve
from noria.engine.parallel import Indivisible, Parallel, head_shares, share, stage_layers
from noria.kernels.choice import Sizes, choose
from noria.kernels.layout import RaggedLayout
from tests.engine.models.families import tiny_model

# (tokens already computed, new ones, blocks): a step of two prompts, then one that decodes the first and reads on.
STEPS = [([(0, 9, [0]), (0, 20, [1, 2])], 0), ([(9, 1, [0]), (20, 5, [1, 2])], 1)]
PLANS = [(2, 1), (1, 2), (2, 2), (3, 1), (1, 3)]


def ids_of(step: int, vocab_size: int) -> Tensor:
    count = sum(new for _, new, _ in STEPS[step][0])
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(step))


def logits_of(whole: Checkpoint, kernels: str, parallel: Parallel, channel: DataChannel | None) -> list[Tensor]:
    """What one rank does: the logits of all tokens of each step, where it samples."""
    spec = whole.spec()
    ops = choose(kernels, Sizes(spec.hidden_size, spec.head_dim, spec.ffn_size, 16), threads=1)
    shards = channel if parallel.tp > 1 else None
    model: Decoder = build_decoder(whole, ops, parallel=parallel, shards=shards)
    part = model.spec
    kv = ops.new_kv_pools(part.num_layers, 3, 16, part.num_kv_heads, part.head_dim, torch.float32)
    found = []
    for number, (rows, decode_rows) in enumerate(STEPS):
        layout = RaggedLayout.build(rows, decode_rows, 16)
        positions = torch.cat([torch.arange(done, done + new) for done, new, _ in rows])
        ids = ids_of(number, spec.vocab_size)
        before = None
        if not parallel.is_first:
            assert channel is not None
            before = channel.receive((len(ids), spec.hidden_size), torch.float32, number).wait()
        hidden = model.hidden_states(ids, positions, kv, layout, before)
        if parallel.is_last:
            found.append(model.logits(hidden))
        else:
            assert channel is not None
            channel.send(hidden, number)
    return found


def run_ranks(whole: Checkpoint, kernels: str, tp: int, pp: int) -> list[Tensor]:
    """A thread for each rank; what the sampling one found."""
    store, device = HashStore(), torch.device("cpu")
    channels: list[DataChannel] = []  # one that went with its thread would take along what it has just sent

    def rank(number: int) -> list[Tensor]:
        parallel = Parallel(number, tp, pp)
        channels.append(channel := DataChannel(parallel, store, device, "127.0.0.1", 60.0))
        return logits_of(whole, kernels, parallel, channel)

    with ThreadPoolExecutor(tp * pp) as pool:
        ranks = [pool.submit(rank, number) for number in range(tp * pp)]
        return [found.result(60) for found in ranks][Parallel(0, tp, pp).sampling_rank]


def make(folder: Path, **fields: Any) -> SafetensorsCheckpoint:
    torch.manual_seed(0)
    sizes = {"vocab_size": 301, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 512}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():  # biases would be zeros
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return SafetensorsCheckpoint(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsCheckpoint:
    """Untied, with biases everywhere."""
    return make(tmp_path_factory.mktemp("tiny"), attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsCheckpoint:
    """Tied, with fewer KV heads than shards."""
    return make(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True, num_key_value_heads=1)


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_ranks_give_the_logits_of_the_whole(name: str, kernels: str, request: pytest.FixtureRequest) -> None:
    whole = request.getfixturevalue(name)
    expected = logits_of(whole, kernels, Parallel(), None)
    for tp, pp in PLANS:
        for found, wanted in zip(run_ranks(whole, kernels, tp, pp), expected, strict=True):
            assert found.shape == wanted.shape
            assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max()), (tp, pp)
            if tp == 1:
                assert torch.equal(found, wanted)  # stages change no bit


def test_ranks_of_a_quantised_model_give_the_logits_of_the_whole() -> None:
    """Nine heads over three KV heads on two shards: six and three."""
    whole = GGUFCheckpoint(resolve("smollm2-135m-instruct").path)
    expected = logits_of(whole, "native", Parallel(), None)
    for found, wanted in zip(run_ranks(whole, "native", 2, 1), expected, strict=True):
        assert float((found - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())
        assert float((found - wanted).abs().mean()) < 1e-4 * float(wanted.abs().max())


def test_ranks_hold_what_they_need_and_no_more(tiny: SafetensorsCheckpoint) -> None:
    """Every number of a divided tensor is read by one rank, and only norms, and biases of sums, by several."""
    parts = [ShardedCheckpoint(tiny, Parallel(rank, 3, 2)) for rank in range(6)]
    for stage in (0, 3):
        for name in tensor_names(parts[stage].spec()):
            pieces = [part.tensor(name) for part in parts[stage : stage + 3]]
            whole = tiny.tensor(parts[stage]._name(name))
            if "norm" in name:
                assert all(torch.equal(piece, whole) for piece in pieces)
            elif "o_proj.bias" in name or "down_proj.bias" in name:
                assert torch.equal(sum(pieces), whole)  # type: ignore[arg-type]
            else:
                axis = 1 if "o_proj" in name or "down_proj" in name else 0
                assert torch.equal(torch.cat(pieces, dim=axis), whole)
                for part, piece in zip(parts[stage : stage + 3], pieces, strict=True):
                    assert part.num_bytes(name) == pytest.approx(4 * piece.numel(), abs=4 * 64)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16"])
def test_pieces_of_a_gguf_tensor(kind: str, tmp_path: Path) -> None:
    """Rows and columns of quantised tensors are those of the whole, and a group is never cut."""
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    values, size = gguf.constants.GGML_QUANT_SIZES[quantised]
    generator = np.random.default_rng(0)
    if kind == "F16":
        data = generator.standard_normal((64, 768)).astype(np.float16)
    elif values == 256:  # no encoder: any bytes are blocks, but for their scales
        blocks = generator.integers(0, 255, (64, 3, size), dtype=np.uint8)
        halves = (slice(0, 4),) if kind == "Q4_K" else (slice(208, 210),)
        for place in halves:
            blocks[..., place] = np.full((64, 3, (place.stop - place.start) // 2), 0.01, np.float16).view(np.uint8)
        data = blocks.reshape(64, -1)
    else:
        data = gguf.quants.quantize(generator.standard_normal((64, 768)).astype(np.float32), quantised)
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_tensor("w", data, raw_dtype=quantised)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    file = GGUFFile(tmp_path / "w.gguf")
    whole = file.dequantize("w")
    for rows, columns in [(slice(16, 48), slice(None)), (slice(None), slice(224, 608)), (slice(3, 5), slice(0, 32))]:
        assert torch.equal(file.dequantize("w", rows, columns), whole[rows, columns])
        if (grouped := read_groups(file, "w", rows, columns)) is not None:
            assert torch.equal(grouped.floats(), whole[rows, columns])
    if kind != "F16":
        with pytest.raises(ModelError, match="cut its groups"):
            read_groups(file, "w", slice(None), slice(0, 40))


def test_shares() -> None:
    assert [share(10, 3, i) for i in range(3)] == [range(4), range(4, 7), range(7, 10)]
    assert [share(160, 2, i, 32) for i in range(2)] == [range(96), range(96, 160)]
    with pytest.raises(Indivisible, match="40 in units of 32 cannot be divided by 2"):
        share(40, 2, 0, 32)
    # The demo model: nine query heads over three KV heads.
    assert head_shares(9, 3, 2, 0) == (range(6), range(2)) and head_shares(9, 3, 2, 1) == (range(6, 9), range(2, 3))
    assert head_shares(8, 2, 4, 3) == (range(6, 8), range(1, 2))  # two shards hold the same KV head
    with pytest.raises(Indivisible, match="9 heads over 3 KV heads cannot be divided by 4"):
        head_shares(9, 3, 4, 0)
    # A head as heavy as eight layers: eleven layers beside it, nineteen before.
    assert [stage_layers(30, 2, stage, 8.0) for stage in range(2)] == [range(19), range(19, 30)]
    assert [len(stage_layers(30, 4, stage, 100.0)) for stage in range(4)] == [10, 10, 9, 1]
    for num_layers in range(1, 12):
        for pp in range(1, num_layers + 1):
            stages = [stage_layers(num_layers, pp, stage, 1.5) for stage in range(pp)]
            assert [layer for stage in stages for layer in stage] == list(range(num_layers)) and all(stages)
    with pytest.raises(Indivisible, match="2 layers cannot be divided into 3 stages"):
        stage_layers(2, 3, 0)


def test_a_model_that_cannot_be_divided_is_refused(tiny: SafetensorsCheckpoint) -> None:
    with pytest.raises(ModelError, match=r"--tp 4 --pp 1 does not fit this model: 6 heads over 3 KV heads"):
        Shares.of(tiny.spec(), Parallel(0, 4, 1))
    with pytest.raises(ModelError, match=r"--tp 1 --pp 5 does not fit this model: 4 layers"):
        Shares.of(tiny.spec(), Parallel(0, 1, 5))


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "gpt-neox", "gpt2", "phi4-mini", "granite"])
def test_other_families_are_divided_alike(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    whole = SafetensorsCheckpoint(tmp_path)
    expected = logits_of(whole, "native", Parallel(), None)
    for tp, pp in [(2, 1), (1, 2)]:
        for found, wanted in zip(run_ranks(whole, "native", tp, pp), expected, strict=True):
            assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max()), (tp, pp)


def test_norms_over_all_heads_are_not_divided(tmp_path: Path) -> None:
    tiny_model("olmo2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="--tp 2 does not fit this model: its norms go over the heads of all ranks"):
        ShardedCheckpoint(SafetensorsCheckpoint(tmp_path), Parallel(0, 2, 1))
