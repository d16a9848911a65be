"""The queue's promises on a smaller flood: what `bench/fairness.py` measures, held to the same bars."""

from __future__ import annotations

from bench.fairness import measure
from bench.store import running_store


async def test_nobody_starves_and_shares_are_kept() -> None:
    with running_store() as store:
        found = await measure(store.url, flood_size=250, samples=12)
    assert found.slowdown <= 2.2, found  # 2 in the bench; a test shares its machine
    assert abs(found.share / 3 - 1) <= 0.1, found
    assert max(found.iterations_to_start) <= 1, found
