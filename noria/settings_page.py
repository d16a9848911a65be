"""docs/configuration.md, made of the settings classes: `python -m noria.settings_page > docs/configuration.md`.

Knows how settings are named in each place; not what any means.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from noria.engine.config import EngineConfig
from noria.engine.wire.settings import SHARED, Settings
from noria.gateway.config import GatewaySettings
from noria.gateway.reload import RELOADABLE
from noria.options import ENVIRONMENT_ONLY, flag, variable

INTRODUCTION = """# Configuration

Made by `python -m noria.settings_page` from the settings classes; a test compares. How the places go together, and what
`noria config check` and SIGHUP do, stands in [deployment.md](deployment.md#settings). Each variable has a twin with
`_FILE` at its end that names a file with the value. In the TOML file the name is the option's, with underscores, under
`[gateway]` or `[engine]`. Settings marked ↻ are taken over on SIGHUP.
"""


def page() -> str:
    """The whole page, with a newline at its end."""
    return "\n".join([INTRODUCTION, *_table(GatewaySettings, "Gateway"), "", *_table(EngineConfig, "Engine")]) + "\n"


def _table(settings: type[Settings], title: str) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| option | variable | takes | default | |"
    yield "|---|---|---|---|---|"
    for name, info in settings.model_fields.items():
        option = "none: it is a secret" if name == "redis_password" else f"`{flag(name)}`"
        if name in ENVIRONMENT_ONLY and info.annotation is SecretStr and name != "redis_password":
            option += " (not in the file)"
        if name in SHARED:
            option += " (may stand above the tables)"
        if settings is GatewaySettings and name in RELOADABLE:
            option += " ↻"
        yield f"| {option} | `{variable(settings, name)}` | {_takes(info)} | {_default(info)} | {info.description} |"


def _takes(info: FieldInfo) -> str:
    annotation: Any = info.annotation
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    kinds = {bool: "yes or no", int: "integer", float: "number", str: "text", SecretStr: "secret"}
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    bounds = [f"{sign} {getattr(one, key):,}" for one in info.metadata for key, sign in signs if hasattr(one, key)]
    return ", ".join([kinds[annotation], *bounds])


def _default(info: FieldInfo) -> str:
    value = info.default
    if isinstance(value, SecretStr) or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(page())
