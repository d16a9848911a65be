"""What the arithmetic of a backend costs in accuracy: `python -m bench.accuracy [--tokens 1000] [--dequantised]`.

Perplexity of a fixed text, and how often the likeliest next token is the one that plain torch in float32 finds with the
same dequantised weights; then one answer in words. The text is prose from Python's own manual, which every machine has.
`--dequantised` writes the integers of a GGUF file as a folder of floats first, which --quantize can round again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from noria.engine.config import EngineConfig
from noria.engine.models.build import tensor_names
from noria.engine.models.load import LoadedModel, load, open_checkpoint, tokenizer_files
from noria.engine.models.source import ModelSource, resolve
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


def write_floats(source: ModelSource, folder: Path) -> None:
    """A Llama of plain rotations as a Hugging Face folder in float32, with its tokenizer."""
    checkpoint, files = open_checkpoint(source), tokenizer_files(source)
    spec = checkpoint.spec()
    if spec.architecture != "llama" or not spec.is_llama_shaped:
        raise SystemExit(f"{source.name}: --dequantised is for Llama's form")
    rope = spec.layers[0].rope
    assert rope is not None
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": rope.base,
        "tie_word_embeddings": spec.tied,
        "eos_token_id": list(spec.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(files.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": files.bos_token}))
    save_file({name: checkpoint.tensor(name) for name in tensor_names(spec)}, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EngineConfig.model_fields["model"].default)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--dequantised", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.dequantised:
            write_floats(resolve(options.model), Path(name))
        compare(name if options.dequantised else options.model, options.tokens)


def compare(model: str, tokens: int) -> None:
    first: tuple[Tensor, Tensor] | None = None
    print(f"{'':18}{'perplexity':>12}{'to fp32':>10}{'top-1':>8}  says")
    floats = resolve(model).kind == "safetensors"
    for name, settings in (SETTINGS | ROUNDED if floats else SETTINGS).items():
        planned = plan(EngineConfig(model=model, kv_memory="64MiB", **settings))
        loaded = load(planned.source, planned.ops, precision=planned.precision)
        tokenizer = Tokenizer.load(tokenizer_files(planned.source))
        ids = tokenizer.encode(topics["objects"] + topics["naming"])[:tokens]
        found = predictions(loaded, ids, planned.kv_dtype)
        first = first or found
        perplexity, base = (float((-scores.mean()).exp()) for scores in (found[0], first[0]))
        same = float((found[1] == first[1]).float().mean())
        said = answer(planned.config)
        print(f"{name:18}{perplexity:12.4f}{perplexity / base - 1:+10.3%}{same:8.4f}  {said!r}", flush=True)


if __name__ == "__main__":
    main()
