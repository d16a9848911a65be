"""GET /playground and /dashboard, and what they are made of: files beside this code, served as they are.

The pages use the public and the admin API only, and load nothing from elsewhere. Knows no request beyond its path.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from noria.gateway.errors import NotFound

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parents[1] / "static"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
}
_HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # asked for each time, and mostly answered with 304
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    tag: str


@cache
def _files() -> dict[str, _File]:
    """All of them, read once: nothing of a URL ever becomes a path."""
    found = {}
    for path in _FOLDER.iterdir():
        if path.suffix in _KINDS:
            body = path.read_bytes()
            found[path.name] = _File(body, _KINDS[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:24]}"')
    return found


@router.get("/playground")
async def playground(request: Request) -> Response:
    return _serve(request, "playground.html")


@router.get("/dashboard")
async def dashboard(request: Request) -> Response:
    return _serve(request, "dashboard.html")


@router.get("/static/{name}")
async def static(name: str, request: Request) -> Response:
    if name.endswith(".html"):
        name = ""  # pages have addresses of their own
    return _serve(request, name)


def _serve(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise NotFound("There is no such file.")
    headers = {**_HEADERS, "etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.kind)
