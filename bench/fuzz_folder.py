"""Hugging Face folders broken on purpose, read whole: each is a model or one clear line, soon, and never a crash.

    python -m bench.fuzz_folder                       # 3,000 folders; --inputs, --seed

A tiny real model is changed in one to three places: values in its JSON files become others of any kind, keys go, bytes
become others, files are cut, and the header of its weights says what is not so. Each is then planned and loaded as an
engine would. Exits with 1 where anything else was raised than what an operator is told in one line, or took longer than
`broken_models.PATIENCE`; such folders are kept.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import broken_models
from bench.broken_models import fault_of
from bench.tiny_model import make
from noria.engine.config import EngineConfig
from noria.engine.memory import MemoryTooSmall
from noria.engine.models.errors import ModelError
from noria.engine.models.load import load
from noria.engine.plan import plan

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *(2**16, 2**31 - 1, 2**31, 2**40, 2**63, 10**30, "", "x", "64", "\x1b[2J\n", "9" * 5000, "../model.safetensors"),
    *([], [None], [[]], [0, "x"], {}, {"": None}, {"content": []}, {"rope_type": "yarn", "factor": 0}),
)
WEIGHTS = "model.safetensors"


def write_whole(folder: Path) -> None:
    """The tiny model, with every file beside its weights that is read where it is there."""
    make(folder, max_len=256)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "layer_types": ["full_attention"] * 2}
    header = json.loads(_header(folder / WEIGHTS))
    index = {"weight_map": {name: WEIGHTS for name in header if name != "__metadata__"}}
    (folder / "1_Pooling").mkdir()
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": [0]}),
        ("special_tokens_map.json", {"bos_token": {"content": "</s>"}}),
        ("chat_template.json", {"chat_template": [{"name": "default", "template": "{{ messages }}"}]}),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}),
        ("model.safetensors.index.json", index),
    ):
        (folder / name).write_text(json.dumps(content))


def _header(weights: Path) -> bytes:
    content = weights.read_bytes()
    return content[8 : 8 + struct.unpack("<Q", content[:8])[0]]


class Breaker:
    """Breaks the files of a folder."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def break_(self, folder: Path) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for _ in range(self._chance.randint(1, 3)):
            path = self._chance.choice([*files, *([folder / "config.json"] * 8)])
            if self._chance.random() < 0.1:
                self._spoil(path)
            elif path.name == WEIGHTS:
                self._change_header(path)
            else:
                self._change(path)

    def _spoil(self, path: Path) -> None:
        """Bytes become others, or go."""
        data = bytearray(path.read_bytes())
        place = self._chance.randrange(len(data) or 1)
        odd = self._chance.choice((b"", b"\xff", b"\x00" * 8, b"[" * 100_000, self._chance.randbytes(8)))
        data[place : self._chance.choice((place, place + 8, len(data)))] = odd
        path.write_bytes(bytes(data))

    def _change(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
        except (ValueError, RecursionError):
            return
        path.write_text(json.dumps(self._changed(content)))

    def _change_header(self, path: Path) -> None:
        content = path.read_bytes()
        try:
            header = json.loads(_header(path))
        except ValueError:
            return
        changed = json.dumps(self._changed(header)).encode()
        path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + len(_header(path)) :])

    def _changed(self, value: Any) -> Any:
        """The value with something in it, or all of it, another."""
        if isinstance(value, dict | list) and value and self._chance.random() < 0.97:
            key: Any = self._chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
            if isinstance(value, dict) and self._chance.random() < 0.1:
                del value[key]
            else:
                value[key] = self._changed(value[key])
            return value
        return self._chance.choice(ODD)


def read_whole(folder: Path) -> None:
    """As an engine reads it. Raises what an engine ends with in one line."""
    planned = plan(EngineConfig(model=str(folder), kernels="torch"))
    load(planned.source, planned.ops, precision=planned.precision, max_len=planned.max_model_len)


def _look_up_families(whole: Path) -> None:
    """A family that is not ours is asked of transformers, whose first import takes seconds: not the folder's fault."""
    shutil.copytree(whole, strange := whole.with_name("strange"))
    (strange / "config.json").write_text(json.dumps({"architectures": ["NobodysForCausalLM"]}))
    with suppress(ModelError):
        read_whole(strange)
    shutil.rmtree(strange)


def faults(folder: Path, inputs: int, seed: int, outcomes: Counter[str]) -> Iterator[str]:
    """What should not have happened, a line for each. The models are kept in `folder`."""
    whole, breaker = folder / "whole", Breaker(seed)
    write_whole(whole)
    _look_up_families(whole)
    for number in range(inputs):
        broken = folder / f"broken{number}"
        shutil.copytree(whole, broken)
        breaker.break_(broken)
        if fault := fault_of(broken, read_whole, outcomes, (MemoryTooSmall,)):
            yield fault
        else:
            shutil.rmtree(broken)
    shutil.rmtree(whole)


def main(arguments: list[str] | None = None) -> int:
    return broken_models.main(__doc__, 3_000, faults, arguments)


if __name__ == "__main__":
    sys.exit(main())
