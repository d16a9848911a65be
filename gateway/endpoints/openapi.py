"""GET /openapi.json: the API as an OpenAPI document.

Knows no endpoint; `reference.py` describes them.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Depends, Request, Response

from noria.gateway.dependencies import authenticate
from noria.gateway.reference import document

router = APIRouter(dependencies=[Depends(authenticate)])


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """This API as an OpenAPI document."""
    app = request.app
    if app.openapi_schema is None:
        app.openapi_schema = document(app)
    return Response(orjson.dumps(app.openapi_schema), media_type="application/json")
