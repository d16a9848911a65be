"""Real loops of two engines share a burst: what `bench/balance.py` measures, with patience for a busy machine."""

from __future__ import annotations

import asyncio

import pytest

from bench.balance import bursts
from bench.store import running_store


@pytest.mark.slow
def test_two_idle_engines_share_a_burst():
    with running_store() as store:
        share, burst = asyncio.run(bursts(store.url, [12], 2, max_left=10.0))[12]
    assert len(burst.numbers) == 12
    assert share <= 8 / 12
