"""How a model's files say that its hidden states become one vector.

Knows the metadata of sentence-transformers and of GGUF; nothing is computed here.
"""

from __future__ import annotations

from typing import Literal

from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.safetensors_checkpoint import read_json
from noria.engine.models.source import ModelSource

PoolingKind = Literal["mean", "last"]

_IN_FOLDER: dict[str, PoolingKind] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_IN_GGUF: dict[int, PoolingKind] = {1: "mean", 3: "last"}


def trained_pooling(source: ModelSource) -> PoolingKind | None:
    """The pooling that the model was trained for; None where its files say nothing. Raises ModelError for another."""
    if source.kind == "gguf":
        metadata = GGUFFile(source.path).metadata
        number = int(metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0))
        if number and number not in _IN_GGUF:
            raise ModelError(f"{source.path}: pooling type {number} is not supported (1: mean, 3: last)")
        return _IN_GGUF.get(number)
    path = source.path / "1_Pooling" / "config.json"
    modes = {name for name, on in read_json(path).items() if name.startswith("pooling_mode_") and on is True}
    if not modes:
        return None
    if len(modes) > 1 or not modes <= _IN_FOLDER.keys():
        raise ModelError(f"{path}: {', '.join(sorted(modes))} is not supported ({', '.join(_IN_FOLDER)})")
    return _IN_FOLDER[modes.pop()]
