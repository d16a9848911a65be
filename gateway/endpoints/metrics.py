"""GET /metrics in Prometheus' text format.

Knows no metric by name.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ServicesDep, authenticate
from noria.gateway.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request, services: ServicesDep) -> Response:
    if not services.settings.open_metrics:
        await authenticate(request)
    await services.directory.refresh()
    return Response(services.metrics.render(), media_type=CONTENT_TYPE)
