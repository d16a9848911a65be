"""An environment of its own for each peer, from the package index, and the demo model's weights as it wants them.

Knows package installers and folders; not what is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.peers.catalogue import INSIDE, Peer, own_python
from noria.engine.config import DEMO_MODEL
from noria.engine.models.source import resolve

# The index's builds of these want CUDA beside them: next to a torch for CPUs their import fails, and with it that of
# whatever tries it. A text model needs neither.
UNWANTED = ("torchvision", "torchaudio")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # no peer gets anything from a model hub


class Absent(Exception):
    """A peer cannot be had here: why, in a line."""


def prepare(peer: Peer, folder: Path) -> Path:
    """Install what is missing, and make the weights. Returns the interpreter. Raises Absent."""
    if not peer.environment:
        return own_python()
    python = _install(peer, folder / peer.environment)
    models = folder / "models"
    models.mkdir(exist_ok=True)
    for kind in peer.needs:
        if not (models / kind).exists():
            _run([str(python), str(INSIDE / "weights.py"), kind, str(resolve(DEMO_MODEL).path), str(models)], folder)
    return python


def _install(peer: Peer, environment: Path) -> Path:
    """What was installed before is taken as it is, unless other packages are wanted by now."""
    python, stamp = environment / "bin" / "python", environment / "installed.json"
    wanted = json.dumps(peer.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {peer.environment}: {' '.join(peer.requirements)}", file=sys.stderr, flush=True)
    shutil.rmtree(environment, ignore_errors=True)
    environment.parent.mkdir(parents=True, exist_ok=True)
    log = environment.parent
    if uv := shutil.which("uv"):  # many times as fast, but knows nothing of pip's settings
        links = [part for place in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("--find-links", place)]
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(environment)], log)
        pip = [uv, "pip"]
        _run([*pip, "install", "--python", str(python), *links, *peer.requirements], log)
        _run([*pip, "uninstall", "--python", str(python), *UNWANTED], log)
    else:
        _run([sys.executable, "-m", "venv", str(environment)], log)
        _run([str(python), "-m", "pip", "install", *peer.requirements], log)
        _run([str(python), "-m", "pip", "uninstall", "--yes", *UNWANTED], log)
    stamp.write_text(wanted)
    return python


def _run(command: list[str], folder: Path) -> None:
    """Its output goes to a log in `folder`. Raises Absent where it fails."""
    log = folder / "setup.log"
    with log.open("ab") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env={**os.environ, **OFFLINE}, check=False)
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise Absent(f"{Path(command[0]).name} {command[1]} failed ({''.join(last)[:200]}); all of it: {log}")
