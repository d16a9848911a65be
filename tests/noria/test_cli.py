"""The command line from outside: what it prints, and that a failure is one line and an exit code."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from noria.version import __version__

ROOT = Path(__file__).parents[2]


def noria(*arguments: str, home: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
    env = {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **variables}
    if home is not None:
        env["XDG_STATE_HOME"] = str(home)
    return subprocess.run(
        [sys.executable, "-m", "noria", *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def fails(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line on standard error, nothing on standard output, this exit code."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("noria"), done.stderr
    for word in words:
        assert word in done.stderr


def test_version() -> None:
    done = noria("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"noria {__version__}\n", "")


def test_version_and_help_load_nothing_heavy() -> None:
    program = (
        "import sys; from noria.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'pydantic_settings', 'redis', 'fastapi', 'structlog') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(arguments: list[str]) -> None:
    done = noria(*arguments)
    assert done.returncode == 0
    for command in ("serve", "gateway", "engine", "models", "simulate"):
        assert command in done.stdout


def test_help_of_serve_lists_what_can_be_set() -> None:
    done = noria("serve", "--help")
    assert done.returncode == 0
    wanted = "host port api-key redis-url state-dir policy max-batch-size max-batch-tokens kv-memory threads log-format"
    for option in wanted.split():
        assert f"--{option} " in done.stdout
    assert "progress-fd" not in done.stdout


@pytest.mark.parametrize("columns", ["80", "140"])
def test_help_cuts_no_name(columns: str) -> None:
    done = noria("serve", "--help", COLUMNS=columns)
    assert done.returncode == 0 and "…" not in done.stdout
    assert {"NORIA_GATEWAY_LIMITS_FAIL", "NORIA_ENGINE_MAX_BATCH_TOKENS"} <= set(re.findall(r"\w+", done.stdout))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["nonsense"]),
        (["serve", "--bogus"], ["--bogus"]),
        (["serve", "a", "b"], ["b"]),
        (["serve", "--port", "x"], ["--port", "integer"]),
        (["serve", "--port", "99999"], ["--port", "99999"]),
        (["serve", "--policy", "fifo"], ["--policy", "fifo", "paged"]),
        (["engine", "--max-batch-size", "0"], ["--max-batch-size", "0"]),
        (["simulate", "--rate", "-1"], ["--rate", "-1"]),
        (["gateway", "--log-format", "xml"], ["--log-format", "xml"]),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], words: list[str]) -> None:
    fails(noria(*arguments), 2, *words)


def test_a_bad_variable_is_one_line() -> None:
    fails(noria("serve", NORIA_ENGINE_THREADS="many"), 2, "NORIA_ENGINE_THREADS", "many")


def test_models_lists_the_demo_model() -> None:
    done = noria("models")
    assert done.returncode == 0
    [line] = [line for line in done.stdout.splitlines() if line.startswith("smollm2-135m-instruct ")]
    assert "gguf" in line and " MB " in line
    assert Path(line.split()[-1]).is_file()


def test_simulate_compares_the_policies() -> None:
    done = noria("simulate", "--requests", "5", "--rate", "0.5")
    assert done.returncode == 0, done.stderr
    for policy in ("static", "orca", "paged"):
        assert policy in done.stdout


def test_serve_of_a_missing_model(tmp_path: Path) -> None:
    fails(noria("serve", str(tmp_path / "no-such-model"), home=tmp_path), 2, "no-such-model")
    assert list(tmp_path.iterdir()) == []


def test_serve_on_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        fails(noria("serve", "--port", port, home=tmp_path), 1, port, "in use", "--port")


def test_a_group_without_a_command_shows_its_help() -> None:
    done = noria("keys")
    assert (done.returncode, done.stderr) == (2, "") and "bootstrap" in done.stdout


def test_a_wrong_option_names_the_help_of_its_command() -> None:
    fails(noria("serve", "--quantize", "int3"), 2, "--quantize", "see noria serve --help")


def test_serve_on_an_address_that_is_not_ours(tmp_path: Path) -> None:
    fails(noria("serve", "--host", "192.0.2.1", home=tmp_path), 1, "192.0.2.1", "--host")


@pytest.mark.parametrize("given_as", ["option", "variable"])
def test_serve_with_an_unreachable_redis_tells_no_password(tmp_path: Path, given_as: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"redis://user:hunter2@127.0.0.1:{port}/0"
    began = time.monotonic()
    if given_as == "option":
        done = noria("serve", "--port", "0", "--redis-url", url, home=tmp_path)
    else:
        done = noria("serve", "--port", "0", home=tmp_path, NORIA_REDIS_URL=url)
    fails(done, 1, "Redis cannot be reached", f"127.0.0.1:{port}")
    assert "hunter2" not in done.stderr
    assert time.monotonic() - began < 30


def test_serve_with_a_url_that_is_none(tmp_path: Path) -> None:
    fails(noria("serve", "--port", "0", "--redis-url", "localhost:6379", home=tmp_path), 2, "--redis-url")


def test_serve_without_a_writable_state_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails(noria("serve", "--port", "0", "--state-dir", str(tmp_path / "file")), 1, "state folder", str(tmp_path))
