"""A library that was built into the installation needs no compiler and no cache that can be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from noria.kernels.cpu import library

ROOT = Path(__file__).parents[2]


def test_a_bundled_library_needs_neither_compiler_nor_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = tmp_path / "image" / library._built(Path.home() / ".cache" / "noria" / "kernels").name
    built.parent.mkdir()
    shutil.copy(Path.home() / ".cache" / "noria" / "kernels" / built.name, built)
    monkeypatch.setattr(library, "BUNDLED", tmp_path / "image")
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    cache = tmp_path / "cache"
    assert library._built(cache) == built and not cache.exists()
    library.load(cache)


def test_bundling_fails_loudly_where_there_is_no_compiler() -> None:
    environment = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "noria.kernels.cpu.library", "--bundle"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no C compiler" in done.stderr
    assert not list((ROOT / "kernels" / "cpu" / "built").glob("*.so"))
