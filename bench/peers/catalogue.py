"""The servers that are compared: what each needs installed, how it is started and how it is to be asked.

Knows command lines and bodies; not how anything is installed, run or measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).parent / "inside"  # scripts that run in the environment of a peer
KEY = "sk-peers"
SLOTS = 64  # requests at once, the most that any measure sends


@dataclass(frozen=True)
class Launch:
    """What a command line is made of."""

    python: Path  # of the peer's environment
    models: Path  # folder of `inside/weights.py`
    state: Path  # an empty folder for files of the server's own
    port: int
    threads: int


@dataclass(frozen=True)
class Peer:
    """One server, on one kind of weights."""

    name: str
    what: str
    command: Callable[[Launch], list[str]]
    model: Callable[[Launch], str]  # its name in the server's API
    environment: str = ""  # its own: peers of one name share it; empty: the one that this runs in
    requirements: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # kinds of weights, as `inside/weights.py` makes them
    ready: str = "/v1/models"
    extra: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})  # full length, greedy


def _noria(launch: Launch) -> list[str]:
    port, threads, state = f"--port={launch.port}", f"--threads={launch.threads}", f"--state-dir={launch.state}"
    slots = f"--max-batch-size={SLOTS}"
    return [str(launch.python), "-m", "noria", "serve", port, state, threads, slots, "--kv-memory=256MiB"]


def _inside(script: str, weights: str) -> Callable[[Launch], list[str]]:
    def command(launch: Launch) -> list[str]:
        numbers = map(str, (launch.port, SLOTS, launch.threads))
        return [str(launch.python), str(INSIDE / script), str(launch.models / weights), *numbers]

    return command


def _transformers(launch: Launch) -> list[str]:
    serve = [str(launch.python.parent / "transformers"), "serve", str(launch.models / "fp32")]
    return [*serve, "--continuous-batching", "--device=cpu", "--dtype=float32", f"--port={launch.port}"]


def _smollm2(launch: Launch) -> str:
    return "smollm2"


LLAMACPP = ("xllamacpp>=2026.10",)  # llama.cpp's own HTTP server, compiled for AVX2
WEIGHTS = ("gguf>=0.17", "accelerate>=1", "torch==2.13.*")  # to read the demo model's and write them in another form
PEERS = (
    Peer(
        "noria",
        "Noria, Q4_1 as shipped",
        _noria,
        lambda launch: "smollm2-135m-instruct",
        ready="/readyz",
    ),
    Peer(
        "llamacpp",
        "llama.cpp, Q4_1 as shipped",
        _inside("serve_llamacpp.py", "q4_1.gguf"),
        _smollm2,
        "llamacpp",
        (*LLAMACPP, "gguf>=0.17"),
        ("q4_1.gguf",),
    ),
    Peer(
        "llamacpp-q8",
        "llama.cpp, Q8_0",
        _inside("serve_llamacpp.py", "q8_0.gguf"),
        _smollm2,
        "llamacpp",
        (*LLAMACPP, "gguf>=0.17"),
        ("q8_0.gguf",),
    ),
    Peer(
        "openvino",
        "OpenVINO GenAI, fp32",
        _inside("serve_openvino.py", "openvino"),
        _smollm2,
        "openvino",
        ("openvino-genai>=2026.4", "optimum-intel[openvino]>=2.2", "fastapi>=0.115", "uvicorn>=0.34", *WEIGHTS),
        ("fp32", "openvino"),
    ),
    Peer(
        "transformers",
        "transformers serve --continuous-batching, fp32",
        _transformers,
        lambda launch: str(launch.models / "fp32"),
        "transformers",
        ("transformers[serving]>=5.24", *WEIGHTS),
        ("fp32",),
        ready="/health",
        # It knows no ignore_eos: no token has this id.
        extra={"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 2})},
    ),
)


def own_python() -> Path:
    """Of the environment that this runs in."""
    return Path(sys.executable)
