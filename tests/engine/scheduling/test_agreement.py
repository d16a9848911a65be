"""Whatever the policy, the pool, the cache and the speculation: the same calls give the same plans, and every request
says what it says alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.engine.scheduling.policy import POLICIES
from tests.engine.scheduling.arrivals import arrivals, shapes
from tests.engine.scheduling.simulated_engine import Shape, SimulatedEngine


@pytest.mark.parametrize("policy", list(POLICIES))
@given(data=st.data())
def test_the_same_calls_give_the_same_plans(policy: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(policy))
    coming = data.draw(st.lists(arrivals, min_size=1, max_size=8))
    runs = []
    for _ in range(2):
        engine = SimulatedEngine(shape)
        for index, arrival in enumerate(coming):
            engine.add(arrival.request(f"r{index}", engine.capacity))
            while len(engine.in_flight) < shape.num_stages and engine.select():
                pass
            engine.collect()
        engine.drain()
        runs.append(engine.plans)
    assert runs[0] == runs[1]


@given(data=st.data())
def test_policies_and_pools_agree_on_every_output(data: st.DataObject) -> None:
    """One set of requests under all policies, and under `paged` with ever smaller pools: `drain` compares each output
    with what the request says alone."""
    coming = data.draw(st.lists(arrivals, min_size=1, max_size=6))
    capacity, windows = 44, data.draw(st.sampled_from([(0,), (5,), (3, 0)]))
    draft = data.draw(st.sampled_from([0, 4]))
    for policy, num_blocks in (("static", 40), ("orca", 40), ("paged", 40), ("paged", 16), ("paged", 11)):
        engine = SimulatedEngine(Shape(policy, True, 1, num_blocks * len(windows), 4, 4, 8, draft, windows=windows))
        for index, arrival in enumerate(coming):
            engine.add(arrival.request(f"r{index}", capacity))
        engine.drain()
