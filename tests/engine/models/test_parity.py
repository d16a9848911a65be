"""The decoder against transformers on the weights of the demo model; tiny models of all families: test_families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.step import Pooling, RowInput, StepInput
from noria.engine.models.decoder import Decoder
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.source import resolve
from tests.engine.models.ragged_steps import BLOCK_SIZE, decoder, expected_logits, pools, step

TOLERANCE = {"native": 1e-3, "torch": 1e-4}  # of the demo model: activations rounded to 16 bits, or not


def random_prompts(vocab_size: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def check_ragged(model: Decoder, reference: Any, prompts: list[list[int]], tolerance: float) -> None:
    """Feed the prompts as one ragged batch in three steps: whole, in chunks, and token by token at the end."""
    expected = [expected_logits(reference, prompt) for prompt in prompts]
    kv = pools(model, len(prompts))
    half = [len(prompt) // 2 for prompt in prompts]
    last = [len(prompt) - 1 for prompt in prompts]
    first = [(i, 0, prompt[: half[i]]) for i, prompt in enumerate(prompts) if half[i] > 0]
    second = [(i, half[i], prompt[half[i] : last[i]]) for i, prompt in enumerate(prompts) if last[i] > half[i]]
    decode = [(i, last[i], prompt[last[i] :]) for i, prompt in enumerate(prompts)]
    # The second step mixes decode rows (the first prompts) with chunks of the others, decode rows first.
    early, late = decode[:2], [row for row in second if row[0] >= 2]
    steps = [(first, 0), ([row for row in second if row[0] < 2], 0), (early + late, len(early)), (decode[2:], None)]
    for rows, decode_rows in steps:
        if rows:
            logits = step(model, kv, rows, len(rows) if decode_rows is None else decode_rows)
            wanted = torch.cat([expected[i][computed : computed + len(ids)] for i, computed, ids in rows])
            assert logits.shape == wanted.shape and logits.dtype == torch.float32
            assert float((logits - wanted).abs().max()) < tolerance * float(wanted.abs().max())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow on cores that other work shares."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["native", "torch"])
def demo(request: pytest.FixtureRequest, demo_reference: Any) -> tuple[Decoder, Any]:
    checkpoint = GGUFCheckpoint(resolve("smollm2-135m-instruct").path)
    return decoder(checkpoint, request.param), demo_reference


def test_demo_logits_equal_transformers(demo: tuple[Decoder, Any]) -> None:
    model, reference = demo
    prompts = random_prompts(model.spec.vocab_size, [3, 20, 1, 70, 17, 33])
    check_ragged(model, reference, prompts, TOLERANCE[model.ops.name])


def test_native_logits_have_the_same_bits_however_they_are_computed(demo: tuple[Decoder, Any]) -> None:
    """Alone or among others, whole or in chunks, as a prompt or decoded: no bit differs."""
    model, _ = demo
    if model.ops.name != "native":
        pytest.skip("plain torch agrees to rounding only")
    prompts = random_prompts(model.spec.vocab_size, [40, 3, 67, 1, 18, 25, 90])
    together = step(model, pools(model, 7), [(i, 0, prompt) for i, prompt in enumerate(prompts)], 0)
    first = together[:40]
    assert torch.equal(step(model, pools(model, 1), [(0, 0, prompts[0])], 0), first)
    kv, pieces = pools(model, 7), []
    for start, end in ((0, 7), (7, 8), (8, 33), (33, 40)):
        mates = [(i, 0, prompts[i]) for i in range(1, 1 + start % 4)]
        pieces.append(step(model, kv, [(0, start, prompts[0][start:end]), *mates], 0)[: end - start])
    assert torch.equal(torch.cat(pieces), first)
    kv, pieces = pools(model, 7), []
    for place in range(20):
        mates = [(i, place, prompts[i][place : place + 1]) for i in (2, 6)] if place % 2 else []
        rows = [(0, place, prompts[0][place : place + 1]), *mates]
        pieces.append(step(model, kv, rows, len(rows))[:1])
    assert torch.equal(torch.cat(pieces), first[:20])


def test_demo_greedy_tokens_equal_transformers(demo: tuple[Decoder, Any]) -> None:
    model, reference = demo
    prompts = [
        [504, 3575, 282, 4649, 314],
        [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    ]
    kv = pools(model, len(prompts))
    logits = step(model, kv, [(i, 0, prompt) for i, prompt in enumerate(prompts)], 0)
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    outputs = [[int(token)] for token in logits[ends].argmax(-1)]
    for decoded in range(11):
        rows = [(i, len(prompt) + decoded, outputs[i][-1:]) for i, prompt in enumerate(prompts)]
        for output, token in zip(outputs, step(model, kv, rows, len(rows)).argmax(-1).tolist(), strict=True):
            output.append(token)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert output == ids[0, len(prompt) :].tolist()


def test_demo_embeddings_equal_transformers(demo: tuple[Decoder, Any]) -> None:
    model, reference = demo
    prompts = random_prompts(model.spec.vocab_size, [1, 5, 40, 100])
    runner = ModelRunner(model, pools(model, len(prompts)), BLOCK_SIZE)
    blocks = [[block * len(prompts) + i for block in range(7)] for i in range(len(prompts))]
    for kind in ("mean", "last"):
        carried = [b""] * len(prompts)
        for start in (0, 33, 66, 99):  # everybody's next 33 tokens
            left = [i for i, prompt in enumerate(prompts) if len(prompt) > start]
            ends = {i: start + 33 >= len(prompts[i]) for i in left}
            pooled = {i: Pooling(kind, carried[i], ends[i]) if kind == "mean" or ends[i] else None for i in left}
            rows = [RowInput(prompts[i][start : start + 33], start, blocks[i], None, pooling=pooled[i]) for i in left]
            for i, output in zip(left, runner.execute(StepInput(rows, 0)), strict=True):
                carried[i] = output.pooled or b""
        for prompt, vector in zip(prompts, carried, strict=True):
            with torch.inference_mode():
                hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
            expected = hidden.mean(dim=0) if kind == "mean" else hidden[-1]
            found = torch.frombuffer(bytearray(vector), dtype=torch.float32)
            assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.999999
            tolerance = TOLERANCE[model.ops.name] * float(expected.abs().max())
            assert float((found - expected).abs().max()) < tolerance
