"""Carries tensors between the ranks of one model: hidden states from stage to stage, sums and logits within a stage.

`torch.distributed`'s process groups, made here and kept here: gloo on CPUs, NCCL on GPUs. Knows no requests, no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from noria.engine.parallel import Parallel

TAGS = 1 << 20
"""Steps that can be told apart while they travel; no more than there are stages are under way at once."""


class ChannelBroken(Exception):
    """Another rank is gone, or has been silent for too long."""


class DataChannel:
    """One rank's ends. Sends and receives may be started by any thread, and sums and gathers by one, the same in the
    same order at all ranks of a stage. Everything raises ChannelBroken."""

    def __init__(self, parallel: Parallel, store: Any, device: torch.device, host: str, timeout: float) -> None:
        """Meets the other ranks at `store`. `host`: the address of this machine that they reach it by. Blocks until all
        are there, `timeout` seconds at most; as long may anything take later on."""
        self._parallel = parallel
        self.device = device
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._pipe = _group(store, "pipe", parallel.rank, parallel.size, device, host, timeout)
        self._stage: Any = None
        if parallel.tp > 1:
            name = f"stage{parallel.stage}"
            self._stage = _group(store, name, parallel.shard, parallel.tp, device, host, timeout)

    # --- from stage to stage --------------------------------------------------------------------------------------

    def send(self, hidden: Tensor, number: int) -> None:
        """Start sending a step's hidden states [T, C] to the next stage; they must not be changed any more."""
        while self._sent and (len(self._sent) >= self._parallel.pp or self._sent[0][0].is_completed()):
            _wait(self._sent.popleft()[0])
        hidden = hidden.contiguous()
        work = _start(self._pipe.send, [hidden], self._parallel.rank + self._parallel.tp, number % TAGS)
        self._sent.append((work, hidden))

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, number: int) -> Arriving:
        """Start receiving a step's hidden states from the stage before."""
        hidden = torch.empty(shape, dtype=dtype, device=self.device)
        work = _start(self._pipe.recv, [hidden], self._parallel.rank - self._parallel.tp, number % TAGS)
        return Arriving(work, hidden)

    # --- within a stage -------------------------------------------------------------------------------------------

    def sum(self, part: Tensor) -> Tensor:
        """See `sharded_ops.Shards`. On CPUs parts are added in the order of the shards: how they were added would
        otherwise depend on the number of tokens, and a token's bits on its batch mates."""
        if self.device.type == "cuda":
            _wait(_start(self._stage.allreduce, [part]))
            return part
        parts = [torch.empty_like(part) for _ in range(self._parallel.tp)]
        _wait(_start(self._stage.allgather, [parts], [part.contiguous()]))
        whole = parts[0]
        for other in parts[1:]:
            whole += other
        return whole

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """See `sharded_ops.Shards`: whole at shard 0."""
        if not len(part):
            return part.new_empty(0, sum(widths))
        wide = part.new_zeros(len(part), max(widths))
        wide[:, : part.shape[1]] = part
        is_root = self._parallel.shard == 0
        parts = [torch.empty_like(wide) for _ in widths] if is_root else []
        options = dist.GatherOptions()
        options.rootRank = 0
        _wait(_start(self._stage.gather, [parts] if is_root else [], [wide], options))
        return torch.cat([p[:, :width] for p, width in zip(parts, widths, strict=True)], dim=1) if is_root else part


class Arriving:
    """Hidden states on their way."""

    def __init__(self, work: Any, hidden: Tensor) -> None:
        self._work = work
        self._hidden = hidden

    def wait(self) -> Tensor:
        """[T, C], once they are here."""
        _wait(self._work)
        return self._hidden


def _group(store: Any, name: str, rank: int, size: int, device: torch.device, host: str, timeout: float) -> Any:
    meeting = PrefixStore(name, store)
    gloo: Any = dist.ProcessGroupGloo
    try:
        if device.type == "cuda":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=timeout)
            return nccl(meeting, rank, size, options)
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout)
        return gloo(meeting, rank, size, options)
    except RuntimeError as error:
        raise ChannelBroken(_first_line(error)) from error


def _start(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except RuntimeError as error:
        raise ChannelBroken(_first_line(error)) from error


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise ChannelBroken(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["(no reason given)"])[0][:300]
