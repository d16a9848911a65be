"""GET /healthz (the process lives) and GET /readyz (a request would be served), both without a key.

Knows no model's details.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Response

from noria.gateway.dependencies import ServicesDep

router = APIRouter()


@router.api_route("/healthz", methods=["GET", "HEAD"])
async def healthz() -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.api_route("/readyz", methods=["GET", "HEAD"])
async def readyz(services: ServicesDep) -> Response:
    """200 once the store answers and an engine with a live lease serves a model; else 503 with the reason."""
    directory = services.directory
    await directory.refresh()
    if not (directory.fresh and await services.broker.ping()):
        return _not_ready("the store does not answer")
    models = [status.card.id for status in directory.live()]
    if not models:
        return _not_ready("no engine serves a model")
    return Response(orjson.dumps({"status": "ready", "models": models}), media_type="application/json")


def _not_ready(reason: str) -> Response:
    body = orjson.dumps({"status": "not ready", "reason": reason})
    return Response(body, 503, {"retry-after": "1"}, "application/json")
