"""Shared by all tests: hypothesis' profiles, the environment that engines run in, and the demo model's reference.

`make test-nightly` (HYPOTHESIS_PROFILE=nightly) tries ten times as many examples as the default, each twice as long.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

import noria.engine  # noqa: F401 - sets the numeric libraries' environment before any test loads torch

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton loads: without a GPU its kernels are interpreted

_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("noria", _common, max_examples=200, stateful_step_count=20)
# Explaining a failure traces every line: minutes here, for little.
_phases = set(Phase) - {Phase.explain}
settings.register_profile("nightly", _common, max_examples=2000, stateful_step_count=40, phases=_phases)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "noria"))


@pytest.fixture(scope="session")
def demo_reference() -> Any:
    """The demo model as transformers computes it: half a minute to load, so that all tests share one."""
    from bench.parity import load_reference

    return load_reference("smollm2-135m-instruct")
