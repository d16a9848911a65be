"""How a model's files say that its answers are to be sampled, where a request does not.

Knows generation_config.json; nothing is sampled here.
"""

from __future__ import annotations

from noria.engine.models.errors import ModelError
from noria.engine.models.safetensors_checkpoint import read_json
from noria.engine.models.source import ModelSource

_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""As in vLLM, these alone; the ranges are the API's."""


def sampling_defaults(source: ModelSource) -> dict[str, float]:
    """The values that the folder's generation_config.json names; a GGUF file has none. Raises ModelError for one that
    no request could ask for."""
    if source.kind == "gguf":
        return {}
    path = source.path / "generation_config.json"
    given = read_json(path)
    found: dict[str, float] = {}
    for name, (least, most) in _RANGES.items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ModelError(f"{path}: {name} = {value!r} is not between {least} and {most}")
        found[name] = value
    return found
