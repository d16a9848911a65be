"""What `noria doctor` looks at where an engine is installed: model, memory, kernels, processors, GPU.

Reads file headers and no weights. Imported only where torch is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from noria.doctor import Finding, fail, ok, warn
from noria.engine.config import EngineConfig
from noria.engine.memory import MemoryTooSmall, available, show_size
from noria.engine.models.errors import ModelError
from noria.engine.models.lora import describe
from noria.engine.plan import plan
from noria.kernels.cpu import library

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_NVIDIA = Path("/proc/driver/nvidia/version")


def check_engine(config: EngineConfig) -> Iterator[Finding]:
    """Everything that this machine must have to run `config.model`."""
    yield from _model(config)
    yield from _adapters(config)
    yield from _kernels(config)
    yield from _processors(config)
    yield from _gpu()


def _model(config: EngineConfig) -> Iterator[Finding]:
    try:
        planned = plan(config)
    except MemoryTooSmall as error:
        yield fail("memory", str(error), "take a smaller model, less --kv-memory, or a machine with more")
    except ModelError as error:
        yield fail("model", str(error), "noria models lists what is here; docs/deployment.md says which families run")
    except ValueError as error:
        yield fail("model", str(error), "change the option that is named")
    else:
        yield ok("model", f"{planned.name}: {planned.source.path}")
        tokens, free = planned.kv_tokens, show_size(available())
        yield ok("memory", f"{show_size(planned.kv_bytes)} for {tokens} tokens of KV; {free} are free")


def _adapters(config: EngineConfig) -> Iterator[Finding]:
    """Whether an adapter fits its model is found out when it is loaded."""
    for name, folder in config.adapters.items():
        try:
            _, _, parameters = describe(folder)
        except ModelError as error:
            yield fail("adapter", f"{name}: {error}", "docs/lora.md says what an adapter's folder holds")
        else:
            yield ok("adapter", f"{name}: {parameters:,} parameters in {folder}")


def _kernels(config: EngineConfig) -> Iterator[Finding]:
    try:
        library.load()
    except library.Unavailable as error:
        yield warn(
            "kernels",
            f"plain torch computes, several times slower: {error}",
            "apt-get install gcc, on a processor with AVX2; then python -m noria.kernels.cpu.library",
        )
    else:
        used = "" if config.kernels != "torch" else "; --kernels torch leaves them aside"
        yield ok("kernels", f"the C library runs here{used}")


def _processors(config: EngineConfig) -> Iterator[Finding]:
    threads, cores = config.threads or os.cpu_count() or 1, float(len(os.sched_getaffinity(0)))
    try:
        quota, period = _QUOTA.read_text().split()
        cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass  # no version 2 control group, or no limit in it
    if threads > cores + 0.5:
        yield warn(
            "processors",
            f"{threads} threads on {cores:g} processors wait for each other in every operation",
            f"--threads {max(int(cores), 1)}",
        )
    else:
        yield ok("processors", f"{threads} threads on {cores:g}")


def _gpu() -> Iterator[Finding]:
    if torch.cuda.is_available():
        yield ok("gpu", torch.cuda.get_device_name(0))
    elif _NVIDIA.exists():
        cure = "install torch with CUDA (make serve without TORCH_INDEX), or give the container its GPU"
        yield warn("gpu", "there is a driver, and torch sees no GPU", cure)
    else:
        yield ok("gpu", "none: the CPU computes")
