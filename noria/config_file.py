"""`noria config check` and `show`: is the configuration file sound, and what do all places together come to.

Knows how settings are written in TOML; not what any means.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from pydantic import SecretStr

from noria.engine.config import EngineConfig
from noria.engine.wire.connection import redact
from noria.engine.wire.settings import CONFIG_VARIABLE, Settings
from noria.gateway.config import GatewaySettings
from noria.options import build

BOTH: tuple[type[Settings], ...] = (GatewaySettings, EngineConfig)


def check() -> int:
    """Raises BadSetting for what is wrong, and says so where nothing is."""
    for settings in BOTH:
        build(settings, {})
    print(f"{os.environ.get(CONFIG_VARIABLE) or 'environment and defaults'}: sound")
    return 0


def show() -> int:
    """What gateway and engine would run with here, as a file that says the same. Raises BadSetting."""
    for settings in BOTH:
        print("\n".join(_table(settings, build(settings, {}))))
    return 0


def _table(settings: type[Settings], values: Settings) -> Iterator[str]:
    yield f"[{settings.table}]"
    for name, info in settings.model_fields.items():
        value = getattr(values, name)
        origin = "" if name in values.model_fields_set else "  (default)"
        yield f"# {info.description}{origin}"
        if isinstance(value, SecretStr):
            yield f"# {name}: a secret; in a file that the environment names"
        else:
            yield f"{name} = {_toml(redact(value) if name == 'redis_url' else value)}"
    yield ""


def _toml(value: object) -> str:
    """Strings, numbers and truths look in TOML as they do in JSON."""
    return json.dumps(value)
