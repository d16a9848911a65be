"""The cost model: prices found again from a log, through noise, and a file of them that `noria simulate` reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from noria.costs import BadCosts, CostModel, fit
from noria.engine.trace import TraceIteration, TraceRow, TraceStart
from noria.options import BadSetting
from noria.simulate import simulate_command
from noria.trace_file import Trace

pytest.importorskip("numpy")

TRUE = CostModel(iteration=0.05, decode_row=0.004, prompt_token=0.002, kv_token=4e-6, prompt_pair=5e-7)


def log(count: int, noise: float = 0.0, held_up: float = 0.0, cost: CostModel = TRUE) -> Trace:
    """Iterations of mixed rows; a share of them takes three times as long as it should."""
    chance = Random(1)
    trace = Trace(TraceStart("tiny", "paged", 16, 512, 0, 1000, 16, 0.0))
    clock = 0.0
    for _ in range(count):
        rows = [(True, 1, chance.randint(1, 2000)) for _ in range(chance.randint(0, 15))]
        rows += [(False, n, n + chance.randint(0, 2000)) for n in (chance.randint(1, 400),) if chance.random() < 0.4]
        if not rows:
            continue
        seconds = cost.of(rows) * chance.uniform(1 - noise, 1 + noise) * (3 if chance.random() < held_up else 1)
        clock += seconds
        named = [
            TraceRow(lane, lane, "d" if decodes else "p", tokens, 1, last)
            for lane, (decodes, tokens, last) in enumerate(rows)
        ]
        trace.iterations.append(
            TraceIteration(clock, named, sum(r[1] for r in rows), 0, 0, 0, 0, 0, round(1e6 * seconds), 0, [], [])
        )
    return trace


def test_prices_are_found_again() -> None:
    found = fit([log(200)])
    assert asdict(found.cost) == pytest.approx(asdict(TRUE), rel=0.01)
    assert found.error < 0.001 and abs(found.held_up) < 0.001


def test_noise_and_hold_ups_do_not_bend_the_prices_but_their_time_is_paid() -> None:
    found = fit([log(600, noise=0.2, held_up=0.05)])
    assert found.num_left_out >= 10 and 0.03 < found.held_up < 0.2
    plain = {name: price * (1 - found.held_up) for name, price in asdict(found.cost).items()}
    assert plain["iteration"] == pytest.approx(TRUE.iteration, rel=0.15)
    assert plain["prompt_token"] == pytest.approx(TRUE.prompt_token, rel=0.15)
    trace = log(600, noise=0.2, held_up=0.05)
    total = sum(found.cost.of((r.phase == "d", r.num_tokens, r.context) for r in i.rows) for i in trace.iterations)
    assert total == pytest.approx(sum(1e-6 * i.forward_us for i in trace.iterations), rel=0.001)


def test_no_price_is_negative() -> None:
    free = CostModel(iteration=0.05, decode_row=0.0, prompt_token=0.002, kv_token=0.0)
    found = fit([log(300, noise=0.3, cost=free)])
    assert min(asdict(found.cost).values()) >= 0


def test_too_little_is_told() -> None:
    with pytest.raises(BadCosts, match="iterations are too few"):
        fit([log(20)])


def test_a_file_of_costs_is_read_by_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TRUE.save(tmp_path / "costs.json", model="tiny")
    assert CostModel.load(tmp_path / "costs.json") == TRUE
    figures = tmp_path / "figures.json"
    simulate_command(requests=5, rate=[1.0], costs=tmp_path / "costs.json", decode_row_ms=7.0, json_file=figures)
    assert json.loads(figures.read_text())["cost"] == {**asdict(TRUE), "decode_row": 0.007}
    (tmp_path / "bad.json").write_text('{"iteration": "much"}')
    with pytest.raises(BadSetting, match=r"^--costs .*bad\.json: .*iteration"):
        simulate_command(costs=tmp_path / "bad.json")
