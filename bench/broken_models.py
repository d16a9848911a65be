"""What the fuzzers of models do with each broken one: read it, time it, and say what should not have happened.

Knows no format: `fuzz_gguf` and `fuzz_folder` break the models and read them.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from noria.engine.models.errors import ModelError

PATIENCE = 5.0  # seconds of processor time
MEMORY = 8 * 2**30  # bytes of address space beyond what there is at the start: a bomb is a MemoryError

Faults = Callable[[Path, int, int, Counter[str]], Iterator[str]]
"""(folder, inputs, seed, outcomes) -> a line for each fault; the models at fault stay in the folder."""


def fault_of(
    path: Path, read: Callable[[Path], object], outcomes: Counter[str], refusals: tuple[type[Exception], ...] = ()
) -> str:
    """Read the model at `path`: anything but a model, one of `refusals` or one line that names it is a fault; so is
    taking long. Empty where all is well."""
    fault, began = "", time.thread_time()
    try:
        read(path)
        outcomes["read"] += 1
    except refusals:
        outcomes["refused"] += 1
    except ModelError as error:
        outcomes["refused"] += 1
        if path.name not in str(error) or not str(error).isprintable():
            fault = f"not one line that names it: {error}"
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if time.thread_time() - began > PATIENCE:
        fault = fault or "took too long"
    return fault and f"{path.name}: {fault}"


def main(description: str | None, inputs: int, faults: Faults, arguments: list[str] | None) -> int:
    """A fuzzer's command: 1 where there are faults, whose models are kept."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=inputs)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, resource.RLIM_INFINITY))
    folder = Path(tempfile.mkdtemp(prefix="noria-fuzz-"))
    outcomes: Counter[str] = Counter()
    found = 0
    for fault in faults(folder, options.inputs, options.seed, outcomes):
        found += 1
        print(fault[:300], flush=True)
    kept = f" in {folder}" if found else ""
    print(f"{outcomes['read']} read, {outcomes['refused']} refused, {found} faults{kept}")
    if not found:
        folder.rmdir()
    return int(found > 0)
