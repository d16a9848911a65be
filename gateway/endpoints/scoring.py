"""POST /score and /rerank (also /v2/rerank): texts compared by the cosine of their embeddings, as vLLM does for models
that embed.

Knows no queue and no pooling.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from operator import mul
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from noria.gateway.dependencies import ServicesDep, TenantDep, json_object, until_client_leaves
from noria.gateway.model_directory import ServedModel
from noria.gateway.prompts import vector_prompts
from noria.gateway.schemas.prompted import PromptedRequest
from noria.gateway.schemas.scoring import RerankRequest, ScoreRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.services import Services, Tenant
from noria.gateway.vectors import Vector, check_embeds, shortened, vectors

router = APIRouter()


@router.post("/score")
async def score(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = parse(ScoreRequest, await json_object(request))
    model = await services.directory.resolve(body.model)
    left = await vector_prompts(model, body, body.text_1, "text_1", add_special_tokens=True)
    right = await vector_prompts(model, body, body.text_2, "text_2", add_special_tokens=True)
    found = await until_client_leaves(request, _unit_vectors(services, tenant, model, body, [*left, *right]))
    firsts, seconds = found[: len(left)], found[len(left) :]
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    scores = [_dot(a, b) for a, b in zip(firsts, seconds, strict=True)]
    return _json(
        {
            "id": f"score-{secrets.token_hex(14)}",
            "object": "list",
            "created": int(time.time()),
            "model": model.card.id,
            "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
            "usage": _usage([*left, *right]),
        }
    )


@router.post("/rerank")
@router.post("/v2/rerank")
async def rerank(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    body = parse(RerankRequest, await json_object(request))
    model = await services.directory.resolve(body.model)
    query = await vector_prompts(model, body, [body.query], "query", add_special_tokens=True)
    documents = await vector_prompts(
        model, body, body.documents, "documents", add_special_tokens=True, most=body.max_tokens_per_doc
    )
    asked, *found = await until_client_leaves(
        request, _unit_vectors(services, tenant, model, body, [*query, *documents])
    )
    scores = [_dot(asked, vector) for vector in found]
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    return _json(
        {
            "id": f"rerank-{secrets.token_hex(14)}",
            "model": model.card.id,
            "results": [
                {
                    "index": index,
                    "relevance_score": scores[index],
                    **({"document": {"text": body.documents[index]}} if body.return_documents else {}),
                }
                for index in ranked
            ],
            "usage": _usage([*query, *documents]),
        }
    )


async def _unit_vectors(
    services: Services, tenant: Tenant, model: ServedModel, body: PromptedRequest, prompts: Sequence[list[int]]
) -> list[Vector]:
    check_embeds(model)

    def shape(_: int, vector: Vector) -> Vector:
        return shortened(vector, None, normalize=True)

    return await vectors(services, tenant, model, prompts, shape, priority=body.priority)


def _dot(a: Vector, b: Vector) -> float:
    return float(sum(map(mul, a, b)))


def _usage(prompts: Sequence[list[int]]) -> dict[str, int]:
    total = sum(map(len, prompts))
    return {"prompt_tokens": total, "total_tokens": total}


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
