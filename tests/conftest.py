"""Settings shared by all tests: hypothesis' profiles, and the environment that engines run in.

`pytest --hypothesis-profile nightly` (or HYPOTHESIS_PROFILE=nightly) looks ten times as hard as the default.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

import noria.engine  # noqa: F401 - sets the numeric libraries' environment before any test loads torch

_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("noria", _common, max_examples=200, stateful_step_count=20)
settings.register_profile("nightly", _common, max_examples=2000, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "noria"))
