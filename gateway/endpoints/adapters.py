"""/v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's names and answers, for whoever runs the place.

Knows no engine.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from noria.gateway.adapters import AdapterOffice
from noria.gateway.dependencies import json_object, operate_with_key
from noria.gateway.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from noria.gateway.schemas.strict import parse

router = APIRouter(dependencies=[Depends(operate_with_key)])


@router.post("/load_lora_adapter")
async def load_adapter(request: Request) -> Response:
    """Answers once every engine has it and every gateway knows it."""
    body = parse(LoadAdapterRequest, await json_object(request))
    await _office(request).load(body.lora_name, body.lora_path, body.base_model_name, in_place=body.load_inplace)
    return _done(f"LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/unload_lora_adapter")
async def unload_adapter(request: Request) -> Response:
    """New requests find nothing of the name; what runs ends as ever."""
    body = parse(UnloadAdapterRequest, await json_object(request))
    await _office(request).unload(body.lora_name, body.base_model_name)
    return _done(f"LoRA adapter '{body.lora_name}' removed successfully.")


def _office(request: Request) -> AdapterOffice:
    office: AdapterOffice = request.app.state.adapters
    return office


def _done(what: str) -> Response:
    return Response(f"Success: {what}", media_type="text/plain")
