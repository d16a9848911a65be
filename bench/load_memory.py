"""How much memory loading takes at its peak, against what the loaded weights hold: `python -m bench.load_memory`.

A process for each part. The peak is VmHWM, reset just before loading, less VmRSS then: whatever the process holds
or has mapped because of the weights, pages of the file included. Held is the sum of the weights' tensors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from noria.engine.config import DEMO_MODEL, EngineConfig, Rendezvous
from noria.engine.models.load import build_decoder, open_checkpoint
from noria.engine.plan import plan

PARTS = [(1, 1, 0), (2, 1, 0), (2, 1, 1), (1, 2, 0), (1, 2, 1), (2, 2, 0), (2, 2, 3)]  # tp, pp, rank


class Alone:
    """The shards of a stage where nothing is computed."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("nothing is computed here")

    gather = sum


def status(field: str) -> int:
    """Bytes, of this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def tensors(value: Any, seen: dict[int, int]) -> dict[int, int]:
    """Bytes of every tensor that hangs on `value`, by address."""
    if isinstance(value, torch.Tensor):
        seen[id(value) if value.is_mkldnn else value.data_ptr()] = value.numel() * value.element_size()
    elif isinstance(value, list | tuple):
        for item in value:
            tensors(item, seen)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            tensors(getattr(value, name), seen)
    return seen


def measure(model: str, kernels: Any, tp: int, pp: int, rank: int) -> dict[str, int]:
    given = Rendezvous(rank=rank, world_size=tp * pp, local_world_size=1, master_addr="here", master_port=1)
    planned = plan(
        EngineConfig(model=model, kernels=kernels, tp=tp, pp=pp, kv_memory="64MiB", max_model_len=512), given
    )
    torch.set_num_threads(1)
    planned.ops.pack_linear([torch.randn(64, 64)])  # lazy set-up of the kernels is none of the weights
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    shards: Any = Alone() if tp > 1 else None
    model_part = build_decoder(open_checkpoint(planned.source), planned.ops, parallel=planned.parallel, shards=shards)
    peak = status("VmHWM") - before
    return {"peak": peak, "held": sum(tensors(model_part._weights, {}).values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--part", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(measure(options.model, options.kernels, *options.part)))
        return
    table = Table("part", "held", "peak", "peak / held")
    for tp, pp, rank in PARTS:
        command = [sys.executable, "-m", "bench.load_memory", "--model", options.model, "--kernels", options.kernels]
        done = subprocess.run([*command, "--part", str(tp), str(pp), str(rank)], capture_output=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        mib = {name: f"{size / 2**20:.1f} MiB" for name, size in found.items()}
        table.add_row(f"tp {tp} pp {pp} rank {rank}", mib["held"], mib["peak"], f"{found['peak'] / found['held']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
