"""The addresses under which clients look for the API, all led to the one under which it is routed.

Knows paths and headers; knows no endpoint.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

_AZURE = "/openai"
_DEPLOYMENT = re.compile(r"/openai/deployments/(?P<model>[^/]+)(?P<rest>/.+)\Z")
_DOUBLED = re.compile(r"/v1(?=/v1(/|\Z))")


def settle(scope: Scope) -> None:
    """Rewrite `scope["path"]` in place: a trailing slash and a doubled `/v1` (a base URL that names it already) mean
    nothing, and Azure's spellings `/openai/v1/…` and `/openai/deployments/{model}/…` are the plain ones. The model
    that a deployment's path names is left in the scope's state for the body."""
    path: str = scope["path"]
    if len(path) > 1 and path.endswith("/"):
        path = path.rstrip("/") or "/"
    if path.startswith(_AZURE + "/"):
        named = _DEPLOYMENT.match(path)
        if named is not None:
            raw: bytes = scope.get("raw_path") or path.encode()
            state = scope.setdefault("state", {})
            state["deployment"] = _deployment(raw, named["model"])
            path = "/v1" + named["rest"]
        else:
            path = path.removeprefix(_AZURE)
    scope["path"] = _DOUBLED.sub("", path)


def _deployment(raw_path: bytes, fallback: str) -> str:
    """The model as it was sent: in a decoded path an escaped slash looks like a border."""
    named = re.match(rb"/openai/deployments/([^/?]+)/", raw_path)
    return unquote(named[1].decode("ascii", "replace")) if named else fallback
