"""Repeats steps of decode rows alone as graphs: launches recorded once for each size, whose numbers alone are new.

What a graph is stands behind a seam: CUDA's, or the same launches one by one. Knows no requests and no kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from noria.engine.execution.device_sampler import likeliest
from noria.engine.execution.ragged import FlatBatch
from noria.engine.execution.step import StepInput
from noria.engine.models.decoder import Decoder
from noria.kernels.decode_buffers import DecodeBuffers
from noria.kernels.pools import KVPools

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the graphs. A step takes the next larger one; more rows than the last are launched one by one."""

LENGTHS = (4096, 32768)
"""Tokens of the longest row, short of the model's own limit: a graph launches a program for every split that a row of
its length might have, and those without keys cost a little."""


class Graphs(Protocol):
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What does again what `run` does, which is called here at least once. `run` asks the host nothing."""


class CudaGraphs:
    """`torch.cuda.CUDAGraph`s that share their memory: one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            run()  # what is compiled or set up at the first call must not be recorded
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


class EagerGraphs:
    """No graphs: the launches again, one by one."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


class DecodeGraphs:
    """Graphs of a model over its pools, made here, the largest first. `run` is called by one thread at a time."""

    def __init__(
        self, model: Decoder, kv: KVPools, graphs: Graphs, *, max_rows: int, max_len: int, num_groups: int = 1
    ) -> None:
        self._model = model
        self._kv = kv
        self.sizes = SIZES[: bisect_left(SIZES, max_rows) + 1]
        self.lengths = (*(length for length in LENGTHS if length < max_len), max_len)
        device = model.ops.device
        self._logits = torch.empty(self.sizes[-1], model.spec.vocab_size, device=device)
        self._greedy = torch.empty(2, self.sizes[-1], dtype=torch.int64, device=device)
        self._steps: dict[tuple[int, int], tuple[DecodeBuffers, Callable[[], None]]] = {}
        for length in reversed(self.lengths):
            for size in reversed(self.sizes):
                rows = DecodeBuffers.build(size, length, kv.block_size, device, num_groups)
                rows.on_device.zero_()
                for slots in rows.slots:
                    slots.fill_(-1)
                self._steps[size, length] = rows, graphs.capture(self._launches(rows))

    def size_for(self, step: StepInput) -> tuple[int, int] | None:
        """Rows and length of the graph that computes `step`; None where there is none: it holds other rows than decode
        rows that choose one token each, or too many of them."""
        plain = step.decode_rows == len(step.rows) and all(
            len(row.token_ids) == 1
            and row.sampling is not None
            and row.prompt_targets is None
            and row.pooling is None
            and not row.adapter
            for row in step.rows
        )
        if not plain or not 0 < len(step.rows) <= self.sizes[-1]:
            return None
        longest = max(row.start for row in step.rows) + 1
        if longest > self.lengths[-1]:
            return None
        rows, length = bisect_left(self.sizes, len(step.rows)), bisect_left(self.lengths, longest)
        return self.sizes[rows], self.lengths[length]

    def run(self, size: tuple[int, int], batch: FlatBatch) -> tuple[Tensor, Tensor]:
        """Logits float32 [R, V] of the step's rows, and `likeliest` of them, which hold until the next run."""
        rows, replay = self._steps[size]
        rows.fill(batch.token_ids, batch.positions, batch.layout)
        replay()
        count = len(batch.token_ids)
        return self._logits[:count], self._greedy[:, :count]

    def _launches(self, rows: DecodeBuffers) -> Callable[[], None]:
        plans = self._model.decode_plans(rows, self._kv)

        @torch.inference_mode()
        def run() -> None:
            logits = self._logits[: rows.num_rows]
            logits.copy_(self._model.logits(self._model.decode(rows, self._kv, plans)))
            self._greedy[:, : rows.num_rows].copy_(likeliest(logits))

        return run
