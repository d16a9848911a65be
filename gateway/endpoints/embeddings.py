"""POST /v1/embeddings: texts or token ids in, one vector each out, as numbers or as base64 of little-endian float32.

Knows no queue and no pooling.
"""

from __future__ import annotations

import base64

import orjson
from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ServicesDep, TenantDep, json_object, until_client_leaves
from noria.gateway.errors import InvalidRequest
from noria.gateway.model_directory import ServedModel
from noria.gateway.prompts import vector_prompts
from noria.gateway.schemas.embeddings import EmbeddingRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.vectors import Vector, check_embeds, packed, shortened, vectors

router = APIRouter()


@router.post("/embeddings")
async def embeddings(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = parse(EmbeddingRequest, await json_object(request))
    model = await services.directory.resolve(body.model)
    check_embeds(model)
    _check_dimensions(model, body.dimensions)
    prompts = await vector_prompts(model, body, body.input, "input", add_special_tokens=body.add_special_tokens)

    def shape(place: int, vector: Vector) -> bytes:
        shown = shortened(vector, body.dimensions, normalize=body.normalize)
        if body.encoding_format == "base64":
            numbers = b'"' + base64.b64encode(packed(shown)) + b'"'
        else:
            numbers = orjson.dumps(shown.tolist())
        return b'{"object":"embedding","index":%d,"embedding":%s}' % (place, numbers)

    work = vectors(services, tenant, model, prompts, shape, priority=body.priority)
    rendered = await until_client_leaves(request, work)
    num_tokens = sum(map(len, prompts))
    tail = {"model": model.card.id, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
    answer = b'{"object":"list","data":[' + b",".join(rendered) + b"]," + orjson.dumps(tail)[1:]
    return Response(answer, media_type="application/json")


def _check_dimensions(model: ServedModel, dimensions: int | None) -> None:
    size = model.card.embedding_size
    if dimensions is not None and dimensions > size:
        message = f"Invalid 'dimensions': {dimensions} is more than the {size} that this model has."
        raise InvalidRequest(message, param="dimensions", code="integer_above_max_value")
