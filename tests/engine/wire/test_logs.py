"""One chain for structlog's and the standard library's records; run in a process of its own, as logging is global."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import logging, structlog
from noria.engine.wire import logs
early = structlog.get_logger("early")
logs.configure("engine", {log_format!r}, {log_level!r})
early.debug("small talk")
early.info("loading", done=1)
logging.getLogger("uvicorn.error").info("Started %s", "here", extra={{"color_message": "\\x1b[1mStarted\\x1b[0m"}})
try:
    secret = "hunter2"
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("failed")
"""


def run(log_format: str, log_level: str = "info") -> list[str]:
    program = PROGRAM.format(log_format=log_format, log_level=log_level)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_is_one_object_per_line_with_role_level_and_time() -> None:
    records = [json.loads(line) for line in run("json")]
    assert [record["event"] for record in records] == ["loading", "Started here", "failed"]
    assert {record["role"] for record in records} == {"engine"}
    assert [record["level"] for record in records] == ["info", "info", "error"]
    assert all(record["timestamp"].endswith("Z") for record in records)
    assert records[0]["done"] == 1
    assert "color_message" not in records[1]
    assert "ZeroDivisionError" in records[2]["exception"]


def test_auto_is_json_without_a_terminal() -> None:
    assert all(line.startswith("{") for line in run("auto"))


def test_text_is_for_reading_and_prints_no_variables_of_a_traceback() -> None:
    lines = run("text")
    assert "loading" in lines[0] and "done=1" in lines[0] and not lines[0].startswith("{")
    assert "ZeroDivisionError" in lines[-1]
    assert not any(line.strip().startswith("secret = hunter2") for line in lines)
    assert "\x1b" not in "".join(lines)


def test_the_level_is_kept() -> None:
    assert next(json.loads(line)["event"] for line in run("json", "debug")) == "small talk"
    assert [json.loads(line)["event"] for line in run("json", "error")] == ["failed"]
