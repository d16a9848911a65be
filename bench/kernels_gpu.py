"""The Triton attention kernels on a GPU: `python -m bench.kernels_gpu [--json FILE]`, a few minutes.

Prints the device's ceilings, then for each batch the time of a layer's attention, what fraction of a ceiling that is,
its error against float64, and the time of torch's own paged attention. Layers rotate, so that no keys wait in a cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bench import graphs_gpu
from noria.kernels import reference
from noria.kernels.layout import RaggedLayout
from noria.kernels.ops import Scores
from noria.kernels.triton_ops import TritonOps

PAGE = 16
COLD = 256 * 2**20  # bytes of keys and values that layers rotate through: more than any cache holds
_RANDOM = random.Random(0)


@dataclass(frozen=True, slots=True)
class Batch:
    """Decode rows by their contexts, prompts as (computed, new) tokens; heads are (query heads, KV heads, size)."""

    name: str
    contexts: list[int]
    prompts: list[tuple[int, int]]
    heads: tuple[int, int, int] = (32, 8, 128)

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [(context - 1, 1) for context in self.contexts] + self.prompts

    def num_bytes(self, element: int) -> int:
        """Keys and values that a layer must read, each once."""
        return 2 * sum(computed + new for computed, new in self.rows) * self.heads[1] * self.heads[2] * element

    def num_operations(self) -> int:
        """Of both products, for the keys that a query may see."""
        pairs = sum(new * computed + new * (new + 1) // 2 for computed, new in self.rows)
        return 4 * pairs * self.heads[0] * self.heads[2]


BATCHES = [
    *(Batch(f"decode {rows} x {keys}", [keys] * rows, []) for rows, keys in ((1, 32768), (16, 1024), (16, 32768))),
    *(Batch(f"decode {rows} x {keys}", [keys] * rows, []) for rows, keys in ((64, 4096), (256, 1024), (256, 4096))),
    *(Batch(f"decode {rows} x 16384", [16384] * rows, []) for rows in (8, 12, 64)),
    Batch("decode 128 x U(32, 8192)", [_RANDOM.randint(32, 8192) for _ in range(128)], []),
    Batch("decode 64 x 1024, heads 9/3 of 64", [1024] * 64, [], (9, 3, 64)),
    Batch("prompts 8 x 2048", [], [(0, 2048)] * 8),
    Batch("prompt of 16384", [], [(0, 16384)]),
    Batch("chunk of 512 after 8192", [], [(8192, 512)]),
    Batch("prompts 64 x U(32, 512)", [], [(0, _RANDOM.randint(32, 512)) for _ in range(64)]),
    Batch("chunk of 512 and 63 rows x 4096", [4096] * 63, [(0, 512)]),
]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch on a device. `layers` pools hold the same keys in different places."""

    q: Tensor
    layout: RaggedLayout
    pools: list[tuple[Tensor, Tensor]]
    ours: Callable[[int], Tensor]
    torchs: Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds of one layer; `of_ceiling` is of bandwidth for decode rows alone, of products otherwise."""

    batch: str
    ours_ms: float
    torch_ms: float | None
    of_ceiling: float
    error: float


def prepare(
    batch: Batch, device: torch.device, dtype: torch.dtype, most_layers: int = 64, kept: torch.dtype | None = None
) -> Prepared:
    """Keys and values are `kept` as queries are, or so."""
    num_heads, kv_heads, dim = batch.heads
    needed = [-(-(computed + new) // PAGE) for computed, new in batch.rows]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [(*row, [order.pop() for _ in range(count)]) for row, count in zip(batch.rows, needed, strict=True)]
    layout = RaggedLayout.build(rows, len(batch.contexts), PAGE)
    layers = max(1, min(most_layers, -(-COLD // batch.num_bytes(dtype.itemsize))))
    ops = TritonOps(device, dtype)
    kv = ops.new_kv_pools(layers, sum(needed), PAGE, kv_heads, dim, kept or dtype)
    for pool in (*kv.keys, *kv.values):
        pool.copy_(torch.randn(pool.shape, dtype=dtype, device=device))
    q = torch.randn(sum(new for _, new in batch.rows), num_heads, dim, device=device).to(dtype)
    positions = torch.zeros(len(q), dtype=torch.int64)
    plan = ops.plan_step(layout, positions, torch.zeros(1, dim), kv, num_heads, Scores(dim**-0.5))
    starts, lengths, table = (part.to(device) for part in (layout.query_start, layout.kv_lens, layout.block_table))
    most_new, longest = max(new for _, new in batch.rows), int(layout.kv_lens.max())

    def torchs(layer: int) -> Tensor:
        attended = varlen_attn(
            q,
            kv.keys[layer % layers],
            kv.values[layer % layers],
            starts,
            None,
            most_new,
            longest,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=table,
        )
        assert isinstance(attended, Tensor)
        return attended

    def ours(layer: int) -> Tensor:
        return ops.ragged_attention(q, kv, layer % layers, plan).view(q.shape)

    return Prepared(q, layout, list(zip(kv.keys, kv.values, strict=True)), ours, torchs)


def error_of(prepared: Prepared, most_rows: int = 2) -> float:
    """Largest difference from float64 over the batch's first and last rows."""
    layout, attended = prepared.layout, prepared.ours(0).cpu()
    k_pool, v_pool = (pool.cpu() for pool in prepared.pools[0])
    starts: list[int] = layout.query_start.tolist()
    worst = 0.0
    for row in sorted({0, layout.num_rows - 1})[:most_rows]:
        alone = RaggedLayout(
            torch.tensor([0, starts[row + 1] - starts[row]], dtype=torch.int32),
            layout.kv_lens[row : row + 1],
            layout.block_table[row : row + 1],
            layout.slot_mapping[starts[row] : starts[row + 1]],
            0,
            PAGE,
        )
        part = slice(starts[row], starts[row + 1])
        scale = prepared.q.shape[2] ** -0.5
        exact = reference.ragged_attention(prepared.q[part].cpu(), k_pool, v_pool, alone, scale, dtype=torch.float64)
        worst = max(worst, float((attended[part].double() - exact).abs().max()))
    return worst


def milliseconds(run: Callable[[int], object], rounds: int = 30) -> float:
    """Median time on the device of one call, after some that are not counted. The device is kept busy until all calls
    are queued: else short ones would be measured by how fast Python launches them."""
    for index in range(5):
        run(index)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # cycles
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for index, event in enumerate(events[1:]):
        run(index)
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def ceilings(device: torch.device) -> tuple[float, float]:
    """Bytes a second that a copy reads and writes, operations a second of a bfloat16 product of 8192."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    copied = milliseconds(lambda _: target.copy_(source))
    multiplied = milliseconds(lambda _: square @ square)
    return 2 * len(source) / copied * 1e3, 2 * 8192**3 / multiplied * 1e3


def measure(batch: Batch, device: torch.device, bandwidth: float, products: float) -> Result:
    prepared = prepare(batch, device, torch.bfloat16)
    # The reference holds all pairs of a prompt at once: the longest would not fit.
    small = max(new * (computed + new) for computed, new in batch.rows) < 2**24
    error = error_of(prepared) if small else float("nan")
    ours = milliseconds(prepared.ours)
    torch_ms: float | None = None
    try:
        torch_ms = milliseconds(prepared.torchs)
    except (RuntimeError, NotImplementedError, ValueError) as problem:
        print(f"{batch.name}: torch's paged attention does not run here: {problem}", file=sys.stderr)
    best = batch.num_operations() / products if batch.prompts else batch.num_bytes(2) / bandwidth
    return Result(batch.name, ours, torch_ms, best * 1e3 / ours, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.kernels_gpu needs a GPU: torch sees no CUDA device")
    device = torch.device("cuda")
    bandwidth, products = ceilings(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bfloat16 product {products / 1e12:.0f} TFLOP/s")
    print(f"{'batch':36}{'ours, ms':>10}{'torch, ms':>10}{'ceiling':>9}{'error':>10}")
    results = []
    for batch in BATCHES:
        result = measure(batch, device, bandwidth, products)
        results.append(result)
        torchs = "-" if result.torch_ms is None else f"{result.torch_ms:.3f}"
        print(
            f"{batch.name:36}{result.ours_ms:10.3f}{torchs:>10}{result.of_ceiling:9.1%}{result.error:10.1e}", flush=True
        )
        torch.cuda.empty_cache()
    graphs_gpu.main()
    if options.json:
        content = {"bandwidth": bandwidth, "products": products, "batches": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
