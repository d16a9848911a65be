"""What the Triton kernels compile to for GPUs that need not be there: no spills, tensor cores, asynchronous copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("registers.json")

SHARED_LIMIT = {80: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may take: of 8.6 and 8.9, which have the least of the sort, and of 9.0."""

WRITE = "`python -m tests.kernels.codegen --write`"

AT_EVERY_RUN = (
    "sm_90 decode 128 group 16 bfloat16",
    "sm_90 prefill 64 group 64 bfloat16",
    "sm_90 prefill 128 group 64 bfloat16",
    "sm_90 decode 64 group 16 bfloat16 over float8",
    "sm_80 decode 64 group 16 bfloat16",
    "sm_80 prefill 128 group 64 bfloat16",
)


def compile_all(*names: str) -> list[dict[str, Any]]:
    """In a process of its own: here Triton may have been loaded as an interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.codegen", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes: list[dict[str, Any]] = json.loads(done.stdout)
    return codes


def check(code: dict[str, Any]) -> None:
    sm, phase, wide = int(code["name"][3:5]), code["name"].split()[1], "float32" in code["name"]
    assert code["stack"] == 0 and code["spills"] == 0, code
    assert code["shared"] <= SHARED_LIMIT[sm], code
    if code["name"].endswith("_kernel"):
        return
    assert code["async_copies"] > 0 and code["wide_addresses"], code
    assert code["products"] + code["warpgroup_products"] > 0, code
    if sm == 90 and phase in ("prefill", "linear") and not wide:
        assert code["warpgroup_products"] > 0, code
    recorded = json.loads(SNAPSHOT.read_text()).get(triton.__version__, {}).get(code["name"])
    assert recorded in (None, code["registers"]), f"{recorded} registers before: {code}; {WRITE} if that is right"


def test_the_code_of_the_table_is_what_it_should_be() -> None:
    codes = compile_all(*AT_EVERY_RUN, "small")
    assert len(codes) == len(AT_EVERY_RUN) + 2 * 5 + 3 + 1  # kernels without a tile, for both, linears, and a write
    for code in codes:
        check(code)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_code_of_every_variant_is_what_it_should_be() -> None:
    codes = compile_all()
    recorded = json.loads(SNAPSHOT.read_text()).get(triton.__version__)
    if recorded is not None:
        assert {code["name"] for code in codes if not code["name"].endswith("_kernel")} == set(recorded)
    for code in codes:
        check(code)
