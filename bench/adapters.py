"""What adapters cost: the time of a decode step with none of its rows, some or all under LoRA adapters, against that
of the model alone. Rows of one adapter lie next to each other, as the engine puts them.

    python -m bench.adapters [MODEL] [--rank 16]

Random adapters of every linear are made for the model's shape. Knows no server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from noria.engine.config import DEMO_MODEL, EngineConfig
from noria.engine.execution.step import RowInput, Sampling, StepInput
from noria.engine.loading import load_model, new_runner
from noria.engine.models.lora import load_adapter
from noria.engine.models.spec import ModelSpec, tensor_shapes
from noria.engine.plan import plan
from noria.engine.wire.messages import SamplingParams

COMPUTED = 200  # tokens of each row that are there already


def make_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> Path:
    """A random adapter of every linear of the model, which must use Llama's names."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        if "_proj.weight" in name:
            at = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, shape[1], generator=noise) * 0.01
            tensors[f"{at}.lora_B.weight"] = torch.randn(shape[0], rank, generator=noise) * 0.01
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", nargs="?", default=DEMO_MODEL)
    options.add_argument("--rank", type=int, default=16)
    options.add_argument("--steps", type=int, default=9)
    given = options.parse_args()
    planned = plan(EngineConfig(model=given.model, kv_memory="256MiB", max_model_len=1024))
    loaded = load_model(planned)
    with tempfile.TemporaryDirectory() as folder:
        made = [make_adapter(Path(folder) / str(i), planned.spec, given.rank, i) for i in range(4)]
        adapters = [load_adapter(path, planned.spec, planned.ops) for path in made]
    runner = new_runner(planned, loaded.model, {adapter.digest: adapter for adapter in adapters})
    digests = [adapter.digest for adapter in adapters]

    def seconds(whose: list[str]) -> float:
        needed = COMPUTED // planned.config.block_size + 1
        sampling = Sampling(SamplingParams(max_tokens=1, temperature=0), COMPUTED + 1)
        rows = [
            RowInput([7 + i], COMPUTED, list(range(i * needed, (i + 1) * needed)), sampling, adapter=digest)
            for i, digest in enumerate(whose)
        ]
        started = time.perf_counter()
        runner.execute(StepInput(rows, len(rows)))
        return time.perf_counter() - started

    print(
        f"{planned.name}, rank {given.rank}, {planned.ops.name} kernels; milliseconds of a step, and times the model's"
    )
    for num in (1, 8, 32):
        mixes = {
            "none": [""] * num,
            "one row": [*[""] * (num - 1), digests[0]],
            "one adapter": [digests[0]] * num,
            "four adapters": sorted(digests[i % 4] for i in range(num)),
            "half and half": sorted([digests[0]] * (num - num // 2) + [""] * (num // 2)),
            "four and none": sorted(["", *digests][i % 5] for i in range(num)),
        }
        times: dict[str, list[float]] = {name: [] for name in mixes}
        for _ in range(given.steps + 1):  # interleaved, so that a noisy neighbour hits all alike; the first warms up
            for name, whose in mixes.items():
                times[name].append(seconds(whose))
        middle = {name: statistics.median(found[1:]) for name, found in times.items()}
        cells = (f"{name} {t * 1000:.1f} ({t / middle['none']:.2f})" for name, t in middle.items())
        print(f"{num:3} rows: " + ", ".join(cells))


if __name__ == "__main__":
    main()
