"""Settings shared by all tests. Knows hypothesis' profiles only.

`pytest --hypothesis-profile nightly` (or HYPOTHESIS_PROFILE=nightly) looks ten times as hard as the default.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("noria", _common, max_examples=200, stateful_step_count=30)
settings.register_profile("nightly", _common, max_examples=2000, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "noria"))
