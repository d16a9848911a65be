"""Builds the C library where it is missing, and opens it.

A library built once stays under a name made of its sources and the flags: in the user's cache, or beside the sources
in an installation that was made to run where no compiler is. Knows no tensor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
BUNDLED = SOURCES / "built"
"""Where an image of the engine keeps its library."""
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")
"""No contraction: which products and sums are fused is written in the source, so that every build rounds alike."""
MACHINE_FLAGS = ("-mavx2", "-mfma", "-mf16c")
BUILD_SECONDS = 180

_P, _I, _L, _F, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_double
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "noria_runs_here": (_I, []),
    "noria_packed_bytes": (_L, [_I, _L, _L]),
    "noria_pack_floats": (None, [_I, _P, _L, _L, _L, _P]),
    "noria_pack_groups": (None, [_I, _P, _P, _P, _L, _L, _L, _P]),
    "noria_rows": (None, [_I, _P, _L, _P, _L, _P]),
    # These end with scratch and threads: without scratch they tell how many bytes of it they need.
    "noria_linear": (_L, [_P, _P, _L, _L, _P, _L, _I, _P, _I]),
    "noria_attention": (_L, [_P, _P, _P, _L, _P, _P, _I]),
    "noria_rope_write_kv": (_L, [_P, _P, _P, _P, _I]),
    "noria_rms_norm": (_L, [_P, _P, _F, _L, _L, _P, _P, _I]),
    "noria_silu_mul": (_L, [_P, _L, _L, _P, _P, _I]),
    "noria_gelu_mul": (_L, [_P, _L, _L, _P, _P, _I]),
    "noria_layers": (_L, [_P, _P, _L, _P, _D, _P, _L, _P, _P, _I]),
}


class Unavailable(Exception):
    """The library cannot be used here; the message says why in one line."""


def load(cache: Path | None = None) -> ctypes.CDLL:
    """The library, built first if need be; `cache` is a folder, by default the user's. Raises `Unavailable`."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"there are no C kernels for {platform.machine()}")
    try:
        library = ctypes.CDLL(str(_built(cache or Path.home() / ".cache" / "noria" / "kernels")))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unavailable(f"the C kernels cannot be opened: {error}") from error
    if not library.noria_runs_here():
        raise Unavailable("this CPU lacks AVX2, FMA or F16C")
    return library


def _built(cache: Path) -> Path:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    digest = hashlib.sha256(repr((FLAGS, MACHINE_FLAGS)).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    name = f"noria_cpu-{digest.hexdigest()[:16]}.so"
    path = next((place / name for place in (BUNDLED, cache) if (place / name).exists()), cache / name)
    if path.exists():
        return path
    if compiler is None:
        raise Unavailable(f"there is no C compiler ({', '.join(COMPILERS)}) to build the C kernels with")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _build(compiler, path)
    except OSError as error:
        raise Unavailable(f"the C kernels cannot be built: {error}") from error
    return path


def _build(compiler: str, path: Path) -> None:
    """Build beside the place and move there in one step: another process may be at it as well."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        check, library = Path(folder) / "check.o", Path(folder) / "library.so"
        kernels = [str(source) for source in sorted(SOURCES.glob("*.c")) if source.name != "check.c"]
        _run([compiler, "-O2", "-fPIC", "-fvisibility=hidden", "-c", str(SOURCES / "check.c"), "-o", str(check)])
        _run([compiler, *FLAGS, *MACHINE_FLAGS, "-shared", *kernels, str(check), "-o", str(library)])
        os.replace(library, path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the C compiler took more than {BUILD_SECONDS} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["(nothing)"]
        raise Unavailable(f"the C compiler failed: {said[0][:200]}")


if __name__ == "__main__":  # python -m noria.kernels.cpu.library [--bundle]: now, rather than at the first start
    try:
        if "--bundle" in sys.argv[1:]:
            print(_built(BUNDLED))  # not opened: the machine that builds an image may be older than those that run it
        else:
            load()
    except Unavailable as reason:
        sys.exit(str(reason)) if "--bundle" in sys.argv[1:] else print(f"plain torch will compute: {reason}")
