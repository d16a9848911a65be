"""Greedy output against `transformers` on the same dequantised weights, token for token, alone and in one mixed batch.

    python bench/parity.py [--prompts 50] [--new-tokens 32]

Where the reference's two best logits lie within 1e-4 either token is right: such places are counted and printed, and
the rest of that prompt is not compared. Exit code 1 when anything else differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM

from noria.engine.config import EngineConfig
from noria.engine.models.source import resolve
from noria.engine.offline import OfflineEngine
from noria.engine.wire.messages import SamplingParams
from noria.engine.wire.tokenizer import Tokenizer

TIE = 1e-4
TEXT = (
    "The harbour town lay quiet under the morning fog while the keeper of the old lighthouse counted the boats that "
    "had come home during the night. def add(a, b):\n    return a + b\n\n1, 2, 3, 5, 8 … Łódź, 東京, naïve café. "
    'What is the capital of France? Water boils at 100 degrees. She said: "It\'s late." <b>bold</b> & more; '
)


@dataclass
class Report:
    """Counts of compared tokens; `differences` are (run, prompt, place, ours, theirs, gap)."""

    tokens: int = 0
    ties: list[tuple[str, int, int, float]] = field(default_factory=list)
    differences: list[tuple[str, int, int, int, int, float]] = field(default_factory=list)


def make_prompts(count: int, longest: int, tokenizer: Tokenizer, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, both ends included, from text in several scripts."""
    rng = random.Random(seed)
    ids = tokenizer.encode(TEXT * 40)
    lengths = [1, 2, longest] + [rng.randint(1, longest) for _ in range(max(0, count - 3))]
    starts = [rng.randrange(len(ids) - longest) for _ in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)][:count]


def reference_step_logits(model: torch.nn.Module, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits [len(output), vocab] that the reference gives before each token of `output`."""
    with torch.inference_mode():
        return model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()


def compare(
    run: str, model: torch.nn.Module, prompts: list[list[int]], outputs: list[list[int]], report: Report
) -> None:
    """Hold each output against the reference's best token at every place, given the same tokens before it.

    Teacher forcing gives the same verdict as the reference's own greedy generation, since both agree up to the first
    difference; and it costs one pass per prompt.
    """
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        logits = reference_step_logits(model, prompt, output)
        for place, token in enumerate(output):
            report.tokens += 1
            best = logits[place].topk(2)
            if token == int(best.indices[0]):
                continue
            gap = float(best.values[0] - logits[place, token])
            if gap < TIE:
                report.ties.append((run, index, place, gap))
            else:
                report.differences.append((run, index, place, token, int(best.indices[0]), gap))
            break


def load_reference(model: str) -> torch.nn.Module:
    """The model as transformers computes it in float32."""
    path = resolve(model).path
    where = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    return AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.float32, **where[1]).eval()


def measure(model: str, reference: torch.nn.Module, *, count: int, longest: int, new_tokens: int) -> Report:
    """Our output for `count` prompts of up to `longest` tokens against the reference's; prints every place that is not
    the same."""
    engine = OfflineEngine(EngineConfig(model=model, max_model_len=1024, prefix_cache=False))
    prompts = make_prompts(count, longest, Tokenizer.load(engine.tokenizer_files))
    params = SamplingParams(max_tokens=new_tokens, temperature=0)
    together = [g.token_ids for g in engine.generate(prompts, params)]
    alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    engine.close()

    report = Report()
    compare("together", reference, prompts, together, report)
    # Where both runs gave the same tokens, one verdict holds for both.
    apart = [i for i in range(len(prompts)) if alone[i] != together[i]]
    compare("alone", reference, [prompts[i] for i in apart], [alone[i] for i in apart], report)
    for run, index, place, gap in report.ties:
        print(f"tie: {run}, prompt {index} of {len(prompts[index])} tokens, place {place}, gap {gap:.1e}")
    for run, index, place, ours, theirs, gap in report.differences:
        print(f"DIFFERS: {run}, prompt {index}, place {place}: {ours}, reference {theirs}, gap {gap:.3g}")
    lengths = [len(prompt) for prompt in prompts]
    print(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {len(apart)} of them not the same alone "
        f"as together: {report.tokens} tokens compared, {len(report.ties)} ties within {TIE}, "
        f"{len(report.differences)} differences"
    )
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EngineConfig.model_fields["model"].default)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--longest", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    report = measure(
        options.model,
        load_reference(options.model),
        count=options.prompts,
        longest=options.longest,
        new_tokens=options.new_tokens,
    )
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main())
