"""Orca's experiment: a quick run on a tiny model, and the recorded run of the real one held to what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import orca_curves
from bench.long_prompts import Scene, measure
from bench.orca_curves import MEASURES, TRACE, differences, simulated, throughput_at, verdict
from bench.real_engine import RealEngine
from bench.tiny_model import make
from noria.costs import CostModel

pytest.importorskip("matplotlib")

RECORDED = Path(__file__).parents[2] / "docs" / "data" / "orca_curves.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make(tmp_path_factory.mktemp("tiny"), max_len=4096))


def test_a_quick_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("state.json", "curves.png", "costs.json", "all.json")}
    run = ["--quick", "--model", model, "--state", str(files["state.json"]), "--report", str(files["curves.png"])]
    orca_curves.main(run[:5])
    orca_curves.main([*run, "--costs", str(files["costs.json"]), "--json", str(files["all.json"])])
    assert "nothing is left" in capsys.readouterr().out
    found = json.loads(files["all.json"].read_text())
    assert set(found["points"]) == {"trace/4/0", "trace/4/0.5", "ask/8/0"}
    lengths = [arrival.output for arrival in TRACE.arrivals(1.0)[:8]]
    for entry in found["points"].values():
        for results in (entry["results"], entry["simulated"]):
            assert set(results) == {"static", "orca", "paged"}
            # The same scheduler on the same requests: only the time that iterations take is another.
            assert results["static"]["num_iterations"] >= results["paged"]["num_iterations"] > max(lengths) - 1
            assert all(0 < result["kv_peak"] <= 1 for result in results.values())
    ask = found["points"]["ask/8/0"]["results"]
    assert ask["paged"]["mean_running"] > ask["orca"]["mean_running"]
    assert CostModel.load(files["costs.json"]).iteration > 0
    assert files["curves.png"].read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_where_it_was_stopped(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, logs = tmp_path / "state.json", tmp_path / "logs"
    points = orca_curves.QUICK[:2]
    assert orca_curves.run(points[:1], state, logs, model, 60.0)
    before = json.loads(state.read_text())["points"]
    assert not orca_curves.run(points, state, logs, model, -1.0), "no time: nothing is begun"
    assert orca_curves.run(points, state, logs, model, 60.0)
    after = json.loads(state.read_text())["points"]
    assert after[points[0].key] == before[points[0].key] and points[1].key in after


def test_throughput_at_a_latency() -> None:
    points = [(10.0, 0.1), (20.0, 0.1), (30.0, 0.3), (31.0, 2.0)]
    assert throughput_at(points, 0.2) == pytest.approx(25.0)
    assert throughput_at(points, 9.0) == 31.0
    assert throughput_at(points, 0.05) == pytest.approx(5.0), "not reached: less than the first point, in proportion"


def test_long_prompts_hold_streams_up_less_in_chunks(model: str, tmp_path: Path) -> None:
    scene = Scene(streams=4, tokens=400, prompts=1, prompt_tokens=3000, quiet=0.03)
    found = measure(RealEngine(model), scene, [64, 0], tmp_path)
    assert set(found) == {"quiet", "64", "whole"} and all(row["gaps"] > 0 for row in found.values())
    assert found["64"]["p99"] < 0.6 * found["whole"]["p99"]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def test_the_simulated_engine_gives_the_curves_of_the_real_one(recorded: dict[str, Any]) -> None:
    """Within 20 %, with the costs fitted to the recorded runs. Not the latencies of `static` at half loads: there it
    depends on a single iteration who has to wait for the next whole batch."""
    simulated(recorded, CostModel(**recorded["cost"]))
    off = differences(recorded)
    assert len(off) >= 50
    throughput, latency = MEASURES
    assert {key: d[throughput] for key, d in off.items() if abs(d[throughput]) > 0.2} == {}
    assert {key for key, d in off.items() if abs(d[latency]) > 0.2} <= {
        "trace/16/0.1/static", "trace/16/0.5/static", "trace/4/0.7/static", "trace/32/0.7/static",
    }  # fmt: skip
    assert all(abs(d[latency]) < 0.35 for d in off.values())


def test_the_recorded_run_shows_what_is_said_of_it(recorded: dict[str, Any]) -> None:
    found = verdict(recorded)
    assert found["peak_orca_over_static"] >= 1.7
    assert found["at_twice_unloaded_orca_over_static"] >= 3
    assert found["paged_over_orca_throughput_least"] >= 0.98 and found["paged_over_orca_latency_most"] <= 1.1
    assert found["ask_running_paged_over_orca"] >= 1.5
