"""GET /healthz (the process lives), GET /readyz and /health (a request would be served), without a key.

Knows no model's details.
"""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, Response

from noria.gateway.dependencies import ServicesDep

router = APIRouter()

_PATIENCE = 2.0
"""Seconds for a store that is only slow: a probe that hangs tells nothing."""


@router.get("/healthz")
async def healthz() -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get("/readyz")
@router.get("/health")
async def readyz(services: ServicesDep) -> Response:
    """200 while the store answers and an engine claims requests of a model (engines that drain do not); else 503 with
    the reason. `/health` is what vLLM and llama.cpp call it."""
    if services.drain.begun:
        return _not_ready("the server is shutting down")
    directory = services.directory
    try:
        async with asyncio.timeout(_PATIENCE):
            await directory.refresh()
            answers = directory.fresh and await services.broker.ping()
    except TimeoutError:
        answers = False
    if not answers:
        return _not_ready("the store does not answer")
    models = [status.card.id for status in directory.live()]
    if not models:
        return _not_ready("no engine serves a model")
    return Response(orjson.dumps({"status": "ready", "models": models}), media_type="application/json")


def _not_ready(reason: str) -> Response:
    body = orjson.dumps({"status": "not ready", "reason": reason})
    return Response(body, 503, {"retry-after": "1"}, "application/json")
