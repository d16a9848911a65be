"""GET /v1/models and GET /v1/models/{id}.

The list holds models that can be used now and by this key, each under its id and under every alias, with the id as its
`root`, and their adapters, with the model as their `parent`; a model whose engines are all away or draining is still
found by name, with the status "unavailable". Knows no engine.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Response

from noria.engine.wire.broker import ModelStatus
from noria.gateway.dependencies import ServicesDep, TenantDep
from noria.gateway.errors import STORE_AWAY, Forbidden, Overloaded
from noria.gateway.model_directory import not_found
from noria.gateway.services import Services

router = APIRouter()


@router.get("/models")
async def models(services: ServicesDep, tenant: TenantDep) -> Response:
    await _look(services)
    directory, listed = services.directory, []
    for status in directory.live():
        for name in dict.fromkeys((status.card.id, *status.card.aliases, *status.adapters)):
            found = directory.find(name)
            # A name that two pools claim is the one's that requests by this name reach.
            if found is not None and found.card.pool == status.card.id and tenant.may_use(found.card):
                listed.append(_shape(name, found))
    return _json({"object": "list", "data": listed})


@router.get("/models/{model_id:path}")
async def model(model_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    status = services.directory.find(model_id)
    if status is None:
        await _look(services)
        status = services.directory.find(model_id)
    if status is None or not tenant.may_use(status.card):
        raise not_found(model_id)
    return _json(_shape(model_id, status))


@router.delete("/models/{model_id:path}")
async def delete_model(model_id: str, services: ServicesDep, _: TenantDep) -> Response:
    """Always refused: at OpenAI only fine-tuned models can be deleted. Adapters are whoever's who runs the place."""
    if services.directory.find(model_id) is None:
        await _look(services)
    status = services.directory.find(model_id)
    if status is None:
        raise not_found(model_id)
    if status.card.adapter is not None:
        raise Forbidden(f"'{model_id}' is an adapter: it goes by POST /v1/unload_lora_adapter.", param="model")
    raise Forbidden(f"The model '{model_id}' cannot be deleted: an engine serves it.", param="model")


async def _look(services: Services) -> None:
    await services.directory.refresh()
    if not services.directory.fresh and not services.directory.models:
        raise Overloaded(STORE_AWAY, retry_after=2)


def _shape(name: str, status: ModelStatus) -> dict[str, Any]:
    card = status.card
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "noria",
        "root": card.id,
        "parent": card.base or None,
        "max_model_len": card.max_model_len,
        "aliases": list(card.aliases),
        "deterministic": card.deterministic,
        "status": "ready" if status.takes_requests else "unavailable",
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
