"""Compiles the Triton kernels for GPUs that need not be there, and tells what the code is made of.

Launches are those of the real code, recorded in place of being run. The interpreter must be off in this process:
`python -m tests.kernels.codegen` compiles every row of the table and prints, as JSON, what `registers.json` keeps;
with `--write` it writes that file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from noria.kernels import configs, elementwise, invariant_linear, ragged_decode, ragged_prefill
from noria.kernels.ragged_decode import DecodeRows, decode_attention
from noria.kernels.ragged_prefill import PrefillRows, prefill_attention

SNAPSHOT = Path(__file__).with_name("registers.json")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FLOAT8 = torch.float8_e4m3fn
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    FLOAT8: "*fp8e4nv",
    torch.int32: "*i32",
}
LONG = 4096  # keys of the longest row: its splits are merged


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the kernel, its arguments, and its options by name."""

    kernel: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Code:
    """What a kernel compiled to. Counts are of instructions in the machine code."""

    name: str
    registers: int
    stack: int  # bytes of a thread: more than 0 are spills
    shared: int  # bytes
    warpgroup_products: int  # HGMMA
    products: int  # HMMA
    async_copies: int  # LDGSTS
    spills: int  # LDL and STL
    wide_addresses: bool  # a page's place is reckoned in 64 bits


@contextmanager
def recorded(module: Any, *names: str) -> Iterator[list[Launch]]:
    """Launches of the module's kernels of these names, none of which is run."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **named: launches.append(Launch(self._kernel, arguments, named))

    kernels = {name: getattr(module, name) for name in names}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, Recorder(kernel))
        yield launches
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def attention_launches(
    phase: configs.Phase,
    tile: configs.Tile,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    kept: torch.dtype | None = None,
    **options: Any,
) -> list[Launch]:
    """What attention of (query heads, KV heads, head size) launches; keys and values are `kept` as `dtype` or so."""
    num_heads, kv_heads, head_dim = heads
    q = torch.empty(256, num_heads, head_dim, dtype=dtype, device="meta")
    pool = torch.empty(64, 16, kv_heads, head_dim, dtype=kept or dtype, device="meta")
    table, ints = (torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((2, LONG // 16), (3,)))
    if phase == "decode":
        rows = DecodeRows.build(2, table, ints, LONG, (num_heads, head_dim))
        with recorded(ragged_decode, "decode_kernel", "merge_kernel") as launches:
            decode_attention(q, pool, pool, rows, q, 0.1, tile, **options)
    else:
        tiles = torch.empty(4, 2, dtype=torch.int32, device="meta")
        with recorded(ragged_prefill, "prefill_kernel") as launches:
            prefill_attention(q, pool, pool, PrefillRows(table, ints, ints, tiles), q, 0.1, tile, **options)
    return launches


def compiled(name: str, launch: Launch, sm: int) -> Code:
    """Compile a launch for compute capability `sm` as Triton would at its first run: pointers and numbers that are
    multiples of 16 are known to be that, where the kernel lets them."""
    kernel, signature, constants, attributes = launch.kernel, {}, {}, {}
    named = {key: value for key, value in launch.named.items() if key in kernel.arg_names}
    options = {key: value for key, value in launch.named.items() if key not in kernel.arg_names}
    for index, param in enumerate(kernel.params):
        value = launch.arguments[index] if index < len(launch.arguments) else named[param.name]
        if param.is_constexpr:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, assembly = (_tool(option, file.name) for option in ("-res-usage", "-sass"))
    ptx: str = binary.asm["ptx"]
    return Code(
        name,
        registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
        stack=int(re.findall(r"STACK:(\d+)", usage)[-1]),
        shared=binary.metadata.shared,
        warpgroup_products=assembly.count("HGMMA"),
        products=assembly.count("HMMA."),
        async_copies=assembly.count("LDGSTS"),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", assembly)),
        wide_addresses=_wide_addresses(ptx, launch),
    )


def _wide_addresses(ptx: str, launch: Launch) -> bool:
    """A page's number is multiplied into 64 bits: by its tokens, by its numbers, or by their bytes."""
    if "PAGE" not in launch.named:
        return True
    tokens = launch.named["PAGE"]
    numbers = tokens * launch.named["KV_HEADS"] * launch.named["HEAD_DIM"]
    sizes = "|".join(str(size) for size in (tokens, numbers, 2 * numbers, 4 * numbers))
    return bool(re.search(rf"(?:mul|mad)\.wide\.s32 [^;]*, (?:{sizes})[;,]", ptx))


def _tool(option: str, path: str) -> str:
    return subprocess.run([TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel to compile: a row of the table with the heads and options that it is launched for."""

    name: str
    sm: int
    phase: configs.Phase
    tile: configs.Tile
    heads: tuple[int, int, int]
    dtype: torch.dtype
    kept: torch.dtype  # keys and values
    options: tuple[tuple[str, float], ...] = ()


def variants() -> list[Variant]:
    """Every row of the tables, plain, and those for 16 bits and for 8 with a window, with a soft cap and for the other
    sizes of heads that they serve."""
    found = []
    for table, dtype, kept in (
        (configs.TABLE, torch.bfloat16, torch.bfloat16),
        (configs.FLOAT8_TABLE, torch.bfloat16, FLOAT8),
        (configs.WIDE_TABLE, torch.float32, torch.float32),
    ):
        for (sm, head_dim, group, phase), tile in table.items():
            heads = (2 * min(group, 4), 2, head_dim) if group <= 16 or phase == "prefill" else (group, 1, head_dim)
            name = f"sm_{sm} {phase} {head_dim} group {group} {str(dtype).removeprefix('torch.')}"
            name += " over float8" if kept == FLOAT8 else ""
            found.append(Variant(name, sm, phase, tile, heads, dtype, kept))
            if dtype == torch.float32:
                continue
            for option, value in (("window", 4096), ("softcap", 50.0)):
                found.append(Variant(f"{name} {option}", sm, phase, tile, heads, dtype, kept, ((option, value),)))
            for smaller in {64: [32], 128: [80, 96], 256: [192]}[head_dim]:
                half = kept if kept == FLOAT8 else torch.float16
                found.append(
                    Variant(f"{name} of {smaller}", sm, phase, tile, (*heads[:2], smaller), torch.float16, half)
                )
    return found


def small_launches() -> list[tuple[str, Launch]]:
    """One of each kernel that is not in the table: the merge of splits, and what is computed token by token."""
    _, merge = attention_launches("decode", configs.Tile(16, 64, 4, 3), (32, 8, 128), torch.bfloat16)
    x, pool = torch.empty(4, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(64, 16, 8, 128, device="meta")
    qkv, ints = x.new_empty(4, 48 * 128), torch.empty(4, dtype=torch.int32, device="meta")
    with recorded(elementwise, "rms_norm_kernel", "rope_write_kv_kernel", "silu_mul_kernel") as launches:
        elementwise.rms_norm(x, x[0], 1e-5)
        elementwise.rms_norm(x, x[0], 1e-5, x)
        elementwise.rope_write_kv(qkv, pool.float()[0, :, 0], ints, ints, pool.to(x.dtype), pool.to(x.dtype))
        elementwise.silu_mul(x)
    return [(launch.kernel.__name__, launch) for launch in (merge, *launches)]


def float8_write() -> Launch:
    """The write of keys and values into pools of 8-bit floats."""
    qkv, ints = torch.empty(4, 48 * 128, dtype=torch.bfloat16, device="meta"), torch.empty(4, dtype=torch.int32)
    pool, angles = torch.empty(64, 16, 8, 128, dtype=FLOAT8, device="meta"), torch.empty(64, 128)
    with recorded(elementwise, "rope_write_kv_kernel") as launches:
        elementwise.rope_write_kv(qkv, angles, ints, ints, pool, pool)
    return launches[0]


def linear_launch(tile: configs.LinearTile, dtype: torch.dtype) -> Launch:
    x, weight = (torch.empty(rows, 576, dtype=dtype, device="meta") for rows in (37, 1000))
    with recorded(invariant_linear, "linear_kernel") as launches:
        invariant_linear.invariant_linear(x, weight, weight[:, 0], tile, 132)
    return launches[0]


def compile_small(sm: int) -> list[Code]:
    """Those of `small_launches`, linears, and what 9.0 has and 8.0 has not."""
    linears = [
        (f"sm_{sm} linear {str(dtype).removeprefix('torch.')}", linear_launch(tile, dtype))
        for (at, size), tile in configs.LINEAR_TABLE.items()
        for dtype in ([torch.bfloat16] if size == 2 else [torch.float32])
        if at == sm
    ]
    named = small_launches() + ([("float8 rope_write_kv_kernel", float8_write())] if sm == 90 else [])
    small = [(f"sm_{sm} {name}", launch) for name, launch in named]
    return [compiled(name, launch, sm) for name, launch in small + linears]


def compile_variant(variant: Variant) -> Code:
    types = variant.dtype, variant.kept
    launch, *_ = attention_launches(variant.phase, variant.tile, variant.heads, *types, **dict(variant.options))
    return compiled(variant.name, launch, variant.sm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="of variants, and `small` for the other kernels; all where none is named"
    )
    parser.add_argument("--write", action="store_true", help="write registers.json for this release of Triton")
    options = parser.parse_args()
    chosen = [variant for variant in variants() if not options.names or variant.name in options.names]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        small = (
            [pool.submit(compile_small, sm) for sm in (90, 80)] if not options.names or "small" in options.names else []
        )
        codes = list(pool.map(compile_variant, chosen)) + [code for done in small for code in done.result()]
    if options.write:
        kept = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
        found = {code.name: code.registers for code in codes if not code.name.endswith("_kernel")}  # those of a tile
        kept.setdefault(triton.__version__, {}).update(found)
        SNAPSHOT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    json.dump([asdict(code) for code in codes], sys.stdout)


if __name__ == "__main__":
    main()
