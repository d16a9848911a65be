"""GET /metrics in Prometheus' text format.

Knows no metric by name.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from noria.engine.wire.exposition import CONTENT_TYPE
from noria.gateway.dependencies import ServicesDep, authenticate

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request, services: ServicesDep) -> Response:
    if not services.settings.open_metrics:
        await authenticate(request)
    await services.directory.refresh()
    services.metrics.store_up.set(services.directory.fresh)
    return Response(services.metrics.render(), media_type=CONTENT_TYPE)
