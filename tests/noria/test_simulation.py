"""The simulated engine: what it must conserve, and what the policies must show on the paper's workload."""

from __future__ import annotations

from dataclasses import replace

import pytest

from noria.costs import CostModel
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.request import Request
from noria.replay import Arrival, Result, Workload, percentile
from noria.simulation import Engine, simulate

ENGINE, COST = Engine(), CostModel()
WORKLOAD = Workload(num_requests=80)
OVERLOAD = 2.0 * ENGINE.capacity(COST, WORKLOAD)


def run(policy: str, rate: float = OVERLOAD, *, engine: Engine = ENGINE, workload: Workload = WORKLOAD) -> Result:
    return simulate(policy, rate, engine=engine, workload=workload, cost=COST)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_request_is_served_once_and_in_full(policy: str) -> None:
    result = run(policy)
    coming = WORKLOAD.arrivals(OVERLOAD)
    assert sorted(served.arrival.name for served in result.served) == sorted(arrival.name for arrival in coming)
    for served in result.served:
        assert served.num_output == served.arrival.output
        assert served.arrival.seconds < served.token_times[0] <= served.end <= result.seconds
        assert served.token_times == sorted(served.token_times)
    assert result.num_rows >= sum(arrival.output for arrival in coming)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    assert run(policy).summary() == run(policy).summary()
    assert run(policy).summary() != run(policy, workload=replace(WORKLOAD, seed=1)).summary()


def test_orca_beats_static_under_load() -> None:
    static, orca = run("static").summary(), run("orca").summary()
    assert orca["tokens_per_second"] > 1.3 * static["tokens_per_second"]
    assert orca["latency_per_token_median"] < 0.6 * static["latency_per_token_median"]


def test_unloaded_policies_are_alike() -> None:
    medians = [run(policy, rate=0.001).summary()["latency_per_token_median"] for policy in POLICIES]
    assert max(medians) < 1.02 * min(medians)


def test_paged_runs_more_at_once_where_clients_ask_for_more_than_they_get() -> None:
    workload = replace(WORKLOAD, max_tokens=1024)
    engine = replace(ENGINE, num_blocks=256)
    orca, paged = (run(policy, engine=engine, workload=workload).summary() for policy in ("orca", "paged"))
    assert paged["mean_batch_size"] > 1.5 * orca["mean_batch_size"]
    assert paged["tokens_per_second"] > orca["tokens_per_second"]


def test_preemption_does_not_eat_what_it_gains() -> None:
    """A pool that is short all the time: the work done twice stays a small part."""
    engine = replace(ENGINE, num_blocks=128, max_chunk_tokens=0)
    paged, orca = run("paged", engine=engine).summary(), run("orca", engine=engine).summary()
    assert paged["num_preemptions"] > 0
    assert paged["tokens_per_second"] > 0.95 * orca["tokens_per_second"]


def test_short_chunks_keep_running_streams_going() -> None:
    whole, short = (run("paged", engine=replace(ENGINE, max_chunk_tokens=chunk)).summary() for chunk in (0, 32))
    assert short["inter_token_p99"] < 0.3 * whole["inter_token_p99"]
    assert short["tokens_per_second"] > 0.75 * whole["tokens_per_second"], "what it costs under overload"


def test_an_iteration_costs_the_sum_of_its_parts() -> None:
    scheduler = ENGINE.scheduler("orca")
    scheduler.add(Request("r", [1] * 100, 100, 2))
    cost = CostModel(iteration=1.0, decode_row=0.5, prompt_token=0.01, kv_token=0.001, prompt_pair=1e-5)
    prefill = scheduler.select()
    assert prefill is not None and cost.seconds(prefill) == pytest.approx(1 + 100 * 0.01 + 5050 * 1e-5)
    scheduler.complete(prefill, [[1]])
    decode = scheduler.select()
    assert decode is not None and cost.seconds(decode) == pytest.approx(1 + 0.5 + 101 * 0.001)


def test_the_workload_is_the_papers() -> None:
    arrivals = Workload(num_requests=2000).arrivals(4.0)
    assert {min(a.prompt for a in arrivals), max(a.prompt for a in arrivals)} == {32, 512}
    assert {min(a.output for a in arrivals), max(a.output for a in arrivals)} == {1, 128}
    assert arrivals[-1].seconds == pytest.approx(500, rel=0.1)
    assert [replace(a, seconds=0) for a in arrivals] == [
        replace(a, seconds=0) for a in Workload(num_requests=2000).arrivals(9.0)
    ], "another load, the same requests"
    assert isinstance(arrivals[0], Arrival)


def test_percentile() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50, 99, 100)
    assert percentile([3.0], 0.5) == percentile([3.0], 0.0) == 3.0
