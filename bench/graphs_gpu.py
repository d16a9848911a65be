"""A whole decode step, launched one by one and as a CUDA graph: `python -m bench.graphs_gpu`, or after
`bench.kernels_gpu`.

Eight layers of an 8B Llama's shape with random weights; what is timed is the engine's own step, ids read back included.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from noria.engine.execution.decode_graphs import CudaGraphs, DecodeGraphs, Graphs
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.step import RowInput, Sampling, StepInput
from noria.engine.models.build import build_weights
from noria.engine.models.decoder import Decoder
from noria.engine.models.spec import LayerSpec, ModelSpec, RopeSpec, tensor_shapes
from noria.engine.wire.messages import SamplingParams
from noria.kernels.triton_ops import TritonOps
from noria.kernels.weights import Weight

PAGE = 16
CONTEXT = 1024  # tokens of each row
ROUNDS = 30


def llama_8b(layers: int = 8) -> ModelSpec:
    each = (LayerSpec(RopeSpec(500_000.0)),) * layers
    return ModelSpec("llama", 128_256, 4096, 32, 8, 128, 14_336, 1e-5, 4096, each, tied=True, eos_token_ids=(0,))


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """See `build.Checkpoint`: numbers of any model."""

    shape_of: ModelSpec
    label: str = "random"

    def spec(self) -> ModelSpec:
        return self.shape_of

    def num_bytes(self, name: str) -> int:
        return 4 * torch.Size(tensor_shapes(self.shape_of)[name]).numel()

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        shape = tensor_shapes(self.shape_of)[name]
        return (torch.rand(shape) - 0.5) * (2 / shape[-1] ** 0.5)

    def weight(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Weight:
        return self.tensor(name, rows, columns)


def step_of(rows: int, context: int) -> StepInput:
    """The next token of each of `rows` requests of `context` tokens."""
    width = context // PAGE + 1
    sampling = Sampling(SamplingParams(max_tokens=9, temperature=0.0), context)
    return StepInput(
        [RowInput([i], context, list(range(i * width, (i + 1) * width)), sampling) for i in range(rows)], rows
    )


def milliseconds(
    spec: ModelSpec, ops: TritonOps, graphs: Graphs, counts: list[int], context: int = CONTEXT, rounds: int = ROUNDS
) -> list[tuple[int, float, float]]:
    """(rows, median launched one by one, median as a graph) for each count of rows; in turns."""
    model = Decoder(spec, build_weights(spec, RandomCheckpoint(spec), ops), ops)
    blocks = max(counts) * (context // PAGE + 1)
    kv = ops.new_kv_pools(spec.num_layers, blocks, PAGE, spec.num_kv_heads, spec.head_dim, ops.dtype)
    made = DecodeGraphs(model, kv, graphs, max_rows=max(counts), max_len=context + 1)
    runners = (ModelRunner(model, kv, PAGE), ModelRunner(model, kv, PAGE, graphs=made))
    found = []
    for count in counts:
        step = step_of(count, context)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for runner, taken in zip(runners, times, strict=True):
                begun = perf_counter()
                runner.execute(step)
                taken.append(1e3 * (perf_counter() - begun))
        found.append((count, statistics.median(times[0]), statistics.median(times[1])))
    return found


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench.graphs_gpu needs a GPU: torch sees no CUDA device")
    ops = TritonOps(torch.device("cuda"), torch.bfloat16)
    print(f"{'decode step, 8 layers of an 8B':36}{'launches, ms':>13}{'graph, ms':>11}")
    for rows, plain, replayed in milliseconds(llama_8b(), ops, CudaGraphs(), [1, 16, 64]):
        print(f"{f'{rows} rows of {CONTEXT}':36}{plain:13.3f}{replayed:11.3f}", flush=True)


if __name__ == "__main__":
    main()
