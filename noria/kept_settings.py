"""What a running `noria serve` was started with, kept in its state folder for commands that look at it.

Knows no secret: those and the store's address are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from noria.engine.wire.settings import Settings

_FILE = "serve.json"
_LEFT_OUT = ("redis_url", "progress_fd")


def keep(folder: Path, *settings: Settings) -> None:
    """Write down what differs from the defaults. Raises OSError."""
    chosen: dict[str, Any] = {}
    for one in settings:
        for name, field in type(one).model_fields.items():
            value = getattr(one, name)
            if value != field.default and not isinstance(value, SecretStr) and name not in _LEFT_OUT:
                chosen[name] = value
    (folder / _FILE).write_text(json.dumps(chosen, indent=1) + "\n")


def kept(folder: Path) -> dict[str, Any]:
    """By field name of either settings class; empty where nothing was kept."""
    try:
        found = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
