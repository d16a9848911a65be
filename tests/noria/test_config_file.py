"""`noria config` and `--config` from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def noria(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
    env = {**kept, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "noria", *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_sound_file_is_said_to_be_and_a_mistake_is_named(tmp_path: Path) -> None:
    path = tmp_path / "noria.toml"
    path.write_text("[gateway]\nport = 8123\n[engine]\npolicy = 'orca'\n")
    done = noria("config", "check", str(path))
    assert (done.returncode, done.stdout) == (0, f"{path}: sound\n")
    path.write_text("[gateway]\nport = 99999\n")
    done = noria("config", "check", str(path))
    assert done.returncode == 2 and done.stderr.startswith(f"noria: {path}: [gateway] port: ")
    path.write_text("[engine]\npolicies = 'orca'\n")
    done = noria("config", "check", NORIA_CONFIG=str(path))
    assert done.returncode == 2 and "did you mean policy?" in done.stderr
    done = noria("engine", "--config", str(path))
    assert done.returncode == 2 and "did you mean policy?" in done.stderr


def test_what_is_shown_is_a_file_that_says_the_same_and_holds_no_secret(tmp_path: Path) -> None:
    (tmp_path / "noria.toml").write_text("[gateway]\nport = 8123\n")
    shown = noria(
        "config", "show", str(tmp_path / "noria.toml"),
        NORIA_API_KEY="sk-hidden", NORIA_REDIS_URL="redis://:hidden@h:1/0", NORIA_ENGINE_POLICY="orca",
    ).stdout  # fmt: skip
    assert "hidden" not in shown
    document = tomllib.loads(shown)
    assert document["gateway"]["port"] == 8123 and document["engine"]["policy"] == "orca"
    (tmp_path / "again.toml").write_text(shown.replace(":***@", "@"))
    assert noria("config", "check", str(tmp_path / "again.toml")).returncode == 0
