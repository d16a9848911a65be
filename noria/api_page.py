"""docs/api.md, made of the routes and schemas that requests are read with: `python -m noria.api_page > docs/api.md`.

Knows no behaviour.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from noria.gateway.app import create_app
from noria.gateway.config import GatewaySettings
from noria.gateway.reference import BODIES, document

OPENAI_FIELDS = Path(__file__).parents[1] / "tests" / "gateway" / "data" / "openai_fields.json"
"""OpenAI's documented fields by "POST /path"; the page is made in a checkout."""

_INTRODUCTION = """# The API

Made by `python -m noria.api_page` from the routes and schemas that requests are read with; a test compares.

Every path also answers without `/v1`, with a doubled `/v1`, with a trailing slash, and under Azure's `/openai/v1/…` and
`/openai/deployments/{model}/…`. The key is in `Authorization: Bearer`, else in Azure's `api-key` or Anthropic's
`x-api-key`. HEAD answers like GET, OPTIONS tells the methods. Bodies may be gzip or deflate. A field that is not listed
is refused with a 400 that names it, and so are those listed as refused. `null` counts as absent. Fields that are no
part of OpenAI's API are marked *ext*. `/v1/messages` is Anthropic's dialect ([messages.md](messages.md)).

Answers have OpenAI's fields. Beside them, a choice of chat completions and completions that has ended has vLLM's
`stop_reason`: the stop string that was found, or the id in `stop_token_ids`; null where the model itself came to an
end, or its tokens did.
"""


def page(app: FastAPI, openai_fields: Mapping[str, list[str]]) -> str:
    """docs/api.md. `openai_fields` are OpenAI's documented fields by "POST /path"."""
    described = document(app)
    schemas = described["components"]["schemas"]
    parts = [_INTRODUCTION, "## Endpoints\n", "| method | path | |\n|---|---|---|"]
    for path, item in described["paths"].items():
        for method, operation in item.items():
            says = operation.get("description") or operation.get("summary", "")
            parts.append(f"| {method.upper()} | `{path}` | {' '.join(says.split())} |")
    for path, kinds in BODIES.items():
        known = openai_fields.get(f"POST {path.removeprefix('/v1')}")
        for kind in kinds:
            title = f"\n## POST {path}" + (f": {kind.__name__}" if len(kinds) > 1 else "")
            parts += [title + "\n", "| field | takes |\n|---|---|"]
            parts += _rows(schemas[kind.__name__], schemas, known, kind.refused)
            if kind.refused:
                parts.append("\nRefused:\n")
                parts += [f"- `{name}` {why}" for name, why in sorted(kind.refused.items())]
    return "\n".join(parts) + "\n"


def _rows(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], known: list[str] | None, refused: Collection[str]
) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in sorted(schema.get("properties", {}).items()):
        if name in refused:
            continue
        marks = (" *required*" if name in required else "") + (" *ext*" if known and name not in known else "")
        yield f"| `{name}`{marks} | {_takes(field, schemas)} |"


def _takes(field: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 0) -> str:
    """A schema in a few words."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        target = schemas[name]
        return "object" if target.get("type") == "object" or depth > 2 else _takes(target, schemas, depth + 1)
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    for union in ("anyOf", "oneOf"):
        if union in field:
            kinds = (_takes(option, schemas, depth + 1) for option in field[union] if option.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds))
    if field.get("type") == "array":
        return f"array of {_takes(field.get('items', {}), schemas, depth + 1)}"
    return f"{field.get('type', 'any')}{_bounds(field)}"


def _bounds(field: Mapping[str, Any]) -> str:
    signs = (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("exclusiveMaximum", "<"),
        ("maxLength", "length ≤"),
    )
    bounds = [f"{sign} {field[key]}" for key, sign in signs if key in field]
    return f", {', '.join(bounds)}" if bounds else ""


if __name__ == "__main__":
    sys.stdout.write(page(create_app(GatewaySettings()), json.loads(OPENAI_FIELDS.read_text())))
