"""`noria trace` as a person runs it, on the log of a real engine of the demo model's kind, only small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.carousel import run
from bench.tiny_model import make
from noria.engine.trace import TraceStart
from noria.options import BadSetting
from noria.trace import trace_command

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trace")
    model = str(make(folder / "tiny"))
    files = {policy: folder / f"{policy}.jsonl" for policy in ("paged", "static")}
    run("paged", files["paged"], model, "192KiB", seed=7)
    run("static", files["static"], model, "192KiB", seed=7)
    return files


def noria_trace(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "noria", "trace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env={"COLUMNS": "120"})


def test_a_table_a_picture_and_figures(logs: dict[str, Path], tmp_path: Path) -> None:
    done = noria_trace(*logs.values(), "-o", tmp_path / "c.svg", "--json", tmp_path / "f.json", "--title", "Twelve")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("paged.jsonl", "static", "slots at work", "padding"))
    figures = json.loads((tmp_path / "f.json").read_text())
    paged, static = (figures[str(logs[policy])] for policy in ("paged", "static"))
    assert paged["num_requests"] == static["num_requests"] == 12
    assert paged["output_tokens"] == static["output_tokens"]
    assert paged["padding"] == 0 < static["padding"] and paged["num_iterations"] < static["num_iterations"]
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


def test_a_part_over_seconds_as_png(logs: dict[str, Path], tmp_path: Path) -> None:
    done = noria_trace(logs["paged"], "-o", tmp_path / "c.PNG", "--by-time", "--first", 5, "--last", 14)
    assert done.returncode == 0, done.stderr
    assert re.search(r"iterations\s+│\s+10 ", done.stdout)
    assert (tmp_path / "c.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_line_cut_short_at_the_end_is_an_engine_that_died(logs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(logs["paged"].read_bytes()[:-9])
    assert noria_trace(tmp_path / "cut").returncode == 0


REQUEST = b'{"type":"request","number":0,"id":"0","num_prompt":4,"max_tokens":5,"num_cached":0}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "has no iterations yet"),
        (b"{}\n", "line 1: "),
        (b"\xff\xfe\n", "line 1: "),
        (REQUEST, "does not begin"),
    ],
)
def test_a_file_that_is_no_log_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "log").write_bytes(content)
    with pytest.raises(BadSetting, match=f"{tmp_path / 'log'}.*{message}"):
        trace_command(files=[tmp_path / "log"])


def test_what_makes_no_sense_is_one_line(logs: dict[str, Path]) -> None:
    with pytest.raises(BadSetting, match=r"^--first 9999: .* has \d+ iterations$"):
        trace_command(files=[logs["paged"]], first=9999)
    done = noria_trace(logs["paged"], "-o", "c.gif")
    assert done.returncode == 2 and done.stderr == "noria: --output c.gif: must end in .png or .svg\n"


def test_the_log_says_what_engine_it_is_of(logs: dict[str, Path]) -> None:
    first = json.loads(logs["static"].read_text().splitlines()[0])
    assert set(first) == {"type", *TraceStart.__struct_fields__}
    assert (first["policy"], first["max_batch_size"], first["max_batch_tokens"]) == ("static", 5, 48)
