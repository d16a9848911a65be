"""Every family against transformers on the same random weights in float32: prompts and decoded tokens, alone and in a
ragged batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from noria.engine.models.decoder import Decoder
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.safetensors_checkpoint import SafetensorsCheckpoint
from tests.engine.models.families import CONFIGS, tiny_model
from tests.engine.models.gguf_writing import ARCHITECTURES, write_gguf
from tests.engine.models.ragged_steps import decoder, expected_logits, pools, step

DECODED = 20
PROMPTS = [3, 40, 1, 90, 17, 65, 2, 31]  # tokens; on both sides of the windows and of the first lengths of rope
TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow on cores that other work shares."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texts(lengths: list[int], vocab_size: int = 300) -> list[list[int]]:
    """Prompts of these lengths with the tokens that are decoded after them."""
    noise = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (length + DECODED,), generator=noise).tolist() for length in lengths]


def run(model: Decoder, rows: list[list[int]], *, chunk: int = 0) -> list[Tensor]:
    """Logits of every token of each text: its prompt in one step (or in chunks), then DECODED tokens one at a time."""
    kv, found = pools(model, len(rows)), [[] for _ in rows]  # type: ignore[var-annotated]
    starts = [0] * len(rows)
    prompts = [len(row) - DECODED for row in rows]
    while any(start < len(row) for start, row in zip(starts, rows, strict=True)):
        # Decode rows first; rows whose prompts are short decode beside the chunks of the long ones.
        ready = [i for i, row in enumerate(rows) if prompts[i] <= starts[i] < len(row)]
        reading = [i for i in range(len(rows)) if starts[i] < prompts[i]]
        ends = {i: starts[i] + 1 for i in ready} | {i: min(prompts[i], starts[i] + (chunk or 999)) for i in reading}
        logits = step(model, kv, [(i, starts[i], rows[i][starts[i] : ends[i]]) for i in ends], len(ready))
        for i, part in zip(ends, logits.split([ends[i] - starts[i] for i in ends]), strict=True):
            found[i].append(part)
            starts[i] = ends[i]
    return [torch.cat(parts) for parts in found]


def check(model: Decoder, reference: Any, lengths: list[int], **options: int) -> None:
    rows = texts(lengths)
    for row, logits in zip(rows, run(model, rows, **options), strict=True):
        wanted = expected_logits(reference, row)
        assert logits.shape == wanted.shape and logits.dtype == torch.float32
        assert float((logits - wanted).abs().max()) < TOLERANCE * float(wanted.abs().max())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3-moe-all"])
def test_a_family_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    reference = tiny_model(name)
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    spec = checkpoint.spec()
    assert spec.num_parameters == sum(p.numel() for p in reference.parameters())
    dynamic = any(layer.rope is not None and layer.rope.kind in ("dynamic", "longrope") for layer in spec.layers)
    for kernels in ("native", "torch"):
        model = decoder(checkpoint, kernels, 64 if dynamic else 512)
        if dynamic:  # what is served decides, and in transformers the length of the text: texts of one kind at a time
            check(model, reference, [3, 40, 1, 17])
            check(decoder(checkpoint, kernels, 90 + DECODED), reference, [90])
            continue
        check(model, reference, [33])
        check(model, reference, PROMPTS, chunk=25 if kernels == "native" else 0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_of_a_family_computes_the_same(name: str, tmp_path: Path) -> None:
    reference = tiny_model(name)
    write_gguf(tmp_path / "tiny.gguf", reference, ARCHITECTURES[name])
    checkpoint = GGUFCheckpoint(tmp_path / "tiny.gguf")
    assert checkpoint.spec().num_parameters == sum(p.numel() for p in reference.parameters())
    if name == "phi4-mini":  # longrope: as a text of this length has it
        check(decoder(checkpoint, "native", 90 + DECODED), reference, [90])
    else:
        check(decoder(checkpoint, "native", 512), reference, PROMPTS, chunk=25)


@pytest.mark.parametrize("name", ["gemma3", "olmoe", "granite", "stablelm"])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = decoder(SafetensorsCheckpoint(tmp_path), "native", 512)
    assert model.ops.deterministic and model.spec.keeps_bits
    rows = texts([40, 3, 17])
    alone, beside = run(model, rows[:1])[0], run(model, rows, chunk=7)[0]
    assert torch.equal(alone, beside)
