"""What the arithmetic of a backend costs in accuracy: `python -m bench.accuracy [--tokens 1000]`.

Perplexity of a fixed text, and how often the likeliest next token is the one that plain torch in float32 finds with the
same dequantised weights; then one answer in words. The text is prose from Python's own manual, which every machine has.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from noria.engine.config import EngineConfig
from noria.engine.models.load import LoadedModel, load, tokenizer_files
from noria.engine.models.source import resolve
from noria.engine.offline import OfflineEngine
from noria.engine.plan import plan
from noria.engine.wire.messages import SamplingParams
from noria.engine.wire.tokenizer import Tokenizer
from noria.kernels.layout import RaggedLayout

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32 (torch)": {"kernels": "torch", "kv_dtype": "fp32"},
    "native, KV fp32": {"kernels": "native", "kv_dtype": "fp32"},
    "native": {"kernels": "native"},
}
ROUNDED: dict[str, dict[str, Any]] = {
    name: {"kernels": "native", "quantize": name} for name in ("int8", "q4")
}  # where the file holds floats
CHUNK = 128
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def predictions(loaded: LoadedModel, ids: list[int], kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probability of each token after the first, and the likeliest token in its place: [N - 1] each."""
    model, spec, blocks = loaded.model, loaded.spec, -(-len(ids) // 16)
    kv = model.ops.new_kv_pools(spec.num_layers, blocks, 16, spec.num_kv_heads, spec.head_dim, kv_dtype)
    scores, best = [], []
    for start in range(0, len(ids) - 1, CHUNK):
        new = ids[start : min(start + CHUNK, len(ids) - 1)]
        layout = RaggedLayout.build([(start, len(new), list(range(blocks)))], 0, 16)
        positions = torch.arange(start, start + len(new))
        logits = model.forward(torch.tensor(new), positions, kv, layout, torch.arange(len(new)))
        targets = torch.tensor(ids[start + 1 : start + 1 + len(new)])
        scores.append(torch.log_softmax(logits, dim=1).gather(1, targets[:, None]).flatten())
        best.append(logits.argmax(dim=1))
    return torch.cat(scores), torch.cat(best)


def answer(config: EngineConfig) -> str:
    engine = OfflineEngine(config)
    tokenizer = Tokenizer.load(engine.tokenizer_files)
    prompt = tokenizer.encode_template(QUESTION)
    (generated,) = engine.generate([prompt], SamplingParams(max_tokens=24, temperature=0))
    engine.close()
    return tokenizer.decode(generated.token_ids).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EngineConfig.model_fields["model"].default)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    first: tuple[Tensor, Tensor] | None = None
    print(f"{'':18}{'perplexity':>12}{'to fp32':>10}{'top-1':>8}  says")
    floats = resolve(options.model).kind == "safetensors"
    for name, settings in (SETTINGS | ROUNDED if floats else SETTINGS).items():
        planned = plan(EngineConfig(model=options.model, kv_memory="64MiB", **settings))
        loaded = load(planned.source, planned.ops, precision=planned.precision)
        tokenizer = Tokenizer.load(tokenizer_files(planned.source))
        ids = tokenizer.encode(topics["objects"] + topics["naming"])[: options.tokens]
        found = predictions(loaded, ids, planned.kv_dtype)
        first = first or found
        perplexity, base = (float((-scores.mean()).exp()) for scores in (found[0], first[0]))
        same = float((found[1] == first[1]).float().mean())
        said = answer(planned.config)
        print(f"{name:18}{perplexity:12.4f}{perplexity / base - 1:+10.3%}{same:8.4f}  {said!r}", flush=True)


if __name__ == "__main__":
    main()
