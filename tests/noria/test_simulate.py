"""`noria simulate` as a person runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from noria.costs import CostModel
from noria.replay import Workload
from noria.simulation import Engine, simulate


def noria_simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "noria", "simulate", "--requests", "10", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def test_a_table_and_a_file_of_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = noria_simulate("--rate", "0.5", "--rate", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("static", "orca", "paged", "tok/s", "0.500", "2.000"))
    figures = json.loads(file.read_text())
    assert [(result["policy"], result["rate"]) for result in figures["results"]] == [
        (policy, rate) for rate in (0.5, 2) for policy in ("static", "orca", "paged")
    ]
    assert figures["workload"]["num_requests"] == 10 and figures["cost"]["iteration"] == 0.047


def test_a_plot_or_a_line_that_says_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "curves.png"
    done = noria_simulate("--plot", str(file))
    if importlib.util.find_spec("matplotlib"):
        assert done.returncode == 0, done.stderr
        assert file.read_bytes().startswith(b"\x89PNG")
    else:
        assert done.returncode == 2 and "pip install matplotlib" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv-blocks", "10"), "--kv-blocks 10: a request may have 1024 tokens"),
        (("--rate", "nan"), "--rate nan: must be more than 0"),
        (("--costs", "absent.json"), "--costs absent.json: "),
        (("--prompt", "9", "3"), "--prompt 9 3: 0 < shortest <= longest"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = noria_simulate(*arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("policy", ["static", "orca", "paged"])
def test_windows_let_more_requests_in(policy: str) -> None:
    workload = Workload(30, prompt=(200, 300), output=(100, 200))
    batches = []
    for windows in ((0,), (96,)):
        engine = Engine(num_blocks=80, max_batch_tokens=128, windows=windows)
        result = simulate(policy, 5.0, engine=engine, workload=workload, cost=CostModel()).summary()
        batches.append(result["mean_batch_size"])
        assert result["num_preemptions"] == 0 or policy == "paged"
    assert batches[1] > 1.3 * batches[0]
