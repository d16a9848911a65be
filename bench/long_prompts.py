"""Inter-token latency of running streams while long prompts arrive: how much of a prompt may stand beside them?

    python -m bench.long_prompts --chunks 32 64 512 --json long_prompts.json

The same streams run once undisturbed and once for every chunk size, all on one model and by turns, an iteration each.
A chunk of 0 reads prompts whole.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.real_engine import RealEngine, run_together
from noria.engine.config import DEMO_MODEL
from noria.replay import Arrival, Result, percentile
from noria.simulation import Engine

BUDGET = 520  # tokens of an iteration, so that a chunk of 512 fits beside eight streams
STREAM_PROMPT = 16


@dataclass(frozen=True)
class Scene:
    """Running streams; after `quiet` seconds come `prompts` long prompts, `apart` seconds apart."""

    streams: int = 8
    tokens: int = 100
    prompts: int = 2
    prompt_tokens: int = 2000
    quiet: float = 1.5
    apart: float = 4.0

    def arrivals(self, num_prompts: int) -> list[Arrival]:
        streams = [Arrival(f"stream{i}", 0.0, STREAM_PROMPT, self.tokens, self.tokens) for i in range(self.streams)]
        prompts = [
            Arrival(f"prompt{i}", self.quiet + i * self.apart, self.prompt_tokens, 1, 1) for i in range(num_prompts)
        ]
        return streams + prompts

    def settings(self, chunk: int) -> Engine:
        """Slots and memory for everybody: only time is scarce. Without a chunk the budget holds all prompts."""
        tokens = self.prompts * (self.prompt_tokens + 16) + self.streams * (STREAM_PROMPT + self.tokens + 16)
        size = self.streams + self.prompts
        budget = BUDGET if chunk else self.prompts * self.prompt_tokens + size * STREAM_PROMPT
        return Engine(size, budget, chunk, -(-tokens // 16) + size)


def figures(result: Result) -> dict[str, float]:
    """Of the gaps between two tokens of a stream: all where no prompt came, else those in which one was being read."""
    streams = [served for served in result.served if served.arrival.name.startswith("stream")]
    prompts = [served for served in result.served if served.arrival.name.startswith("prompt")]
    spans = [(served.arrival.seconds, served.token_times[0]) for served in prompts]
    gaps = [
        after - before
        for stream in streams
        for before, after in zip(stream.token_times[1:], stream.token_times[2:], strict=False)
        if not spans or any(before < end and after > start for start, end in spans)
    ]
    first = [served.time_to_first_token for served in prompts]
    return {
        "p50": percentile(gaps, 0.5),
        "p99": percentile(gaps, 0.99),
        "longest": max(gaps),
        "prompt_read": percentile(first, 0.5) if first else 0.0,
        "gaps": len(gaps),
    }


def measure(engine: RealEngine, scene: Scene, chunks: Sequence[int], logs: Path) -> dict[str, dict[str, float]]:
    """Figures by chunk size, and those of the quiet run under "quiet". Seconds."""
    names = ["quiet", *(str(chunk) if chunk else "whole" for chunk in chunks)]
    replays = [
        engine.replay("paged", 0.0, scene.settings(chunk), scene.arrivals(scene.prompts if n else 0), logs / names[n])
        for n, chunk in enumerate([chunks[0], *chunks])
    ]
    return dict(zip(names, map(figures, run_together(replays)), strict=True))


def table_of(found: dict[str, dict[str, float]]) -> Table:
    table = Table(title="between two tokens of a running stream, while a long prompt is read", box=None)
    for heading in ("chunk", "p50 ms", "p99 ms", "p99 / quiet", "longest ms", "prompt read in s"):
        table.add_column(heading, justify="right")
    for name, row in found.items():
        ratio = row["p99"] / found["quiet"]["p99"]
        cells = (1e3 * row["p50"], 1e3 * row["p99"], ratio, 1e3 * row["longest"], row["prompt_read"])
        table.add_row(
            name, *(f"{cell:.2f}" if cell is ratio else f"{cell:.{0 if cell > 50 else 1}f}" for cell in cells)
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 512, 0])
    parser.add_argument("--streams", type=int, default=Scene.streams)
    parser.add_argument("--tokens", type=int, default=Scene.tokens, help="of each stream")
    parser.add_argument("--prompts", type=int, default=Scene.prompts)
    parser.add_argument("--prompt-tokens", type=int, default=Scene.prompt_tokens)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    scene = Scene(options.streams, options.tokens, options.prompts, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = measure(RealEngine(options.model), scene, options.chunks, Path(folder))
    Console().print(table_of(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
