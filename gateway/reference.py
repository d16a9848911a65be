"""What the API takes, as an OpenAPI document made of the routes and the request schemas themselves.

Knows no behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from noria.gateway.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from noria.gateway.schemas.administration import (
    AdminKeyCreate,
    ApiKeyCreate,
    ApiKeyRotate,
    ApiKeyUpdate,
    OrganizationCreate,
    OrganizationUpdate,
    PriceSet,
    ProjectCreate,
    ProjectUpdate,
    RateLimitUpdate,
    ServiceAccountCreate,
    ServiceAccountUpdate,
)
from noria.gateway.schemas.anthropic import CountTokensRequest, MessagesRequest
from noria.gateway.schemas.batches import BatchRequest
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.completions import CompletionRequest
from noria.gateway.schemas.conversations import ConversationChange, ConversationRequest, ItemsRequest
from noria.gateway.schemas.embeddings import EmbeddingRequest
from noria.gateway.schemas.metadata import StoredChange
from noria.gateway.schemas.responses import CompactRequest, InputTokensRequest, ResponseRequest
from noria.gateway.schemas.scoring import RerankRequest, ScoreRequest
from noria.gateway.schemas.strict import RequestBody
from noria.gateway.schemas.tokenization import DetokenizeRequest, TokenizeChat, TokenizeText
from noria.gateway.schemas.uploads import CompleteUploadRequest, UploadRequest
from noria.version import __version__

BODIES: Mapping[str, tuple[type[RequestBody], ...]] = {
    "/v1/batches": (BatchRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/v1/chat/completions/{completion_id}": (StoredChange,),
    "/v1/completions": (CompletionRequest,),
    "/v1/conversations": (ConversationRequest,),
    "/v1/conversations/{conversation_id}": (ConversationChange,),
    "/v1/conversations/{conversation_id}/items": (ItemsRequest,),
    "/v1/embeddings": (EmbeddingRequest,),
    "/v1/load_lora_adapter": (LoadAdapterRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountTokensRequest,),
    "/v1/organization": (OrganizationUpdate,),
    "/v1/organization/admin_api_keys": (AdminKeyCreate,),
    "/v1/organization/prices/{model}": (PriceSet,),
    "/v1/organization/projects": (ProjectCreate,),
    "/v1/organization/projects/{project_id}": (ProjectUpdate,),
    "/v1/organization/projects/{project_id}/api_keys": (ApiKeyCreate,),
    "/v1/organization/projects/{project_id}/api_keys/{key_id}": (ApiKeyUpdate,),
    "/v1/organization/projects/{project_id}/api_keys/{key_id}/rotate": (ApiKeyRotate,),
    "/v1/organization/projects/{project_id}/rate_limits/{rate_limit_id}": (RateLimitUpdate,),
    "/v1/organization/projects/{project_id}/service_accounts": (ServiceAccountCreate,),
    "/v1/organization/projects/{project_id}/service_accounts/{account_id}": (ServiceAccountUpdate,),
    "/v1/organizations": (OrganizationCreate,),
    "/v1/responses": (ResponseRequest,),
    "/v1/responses/input_tokens": (InputTokensRequest,),
    "/v1/responses/compact": (CompactRequest,),
    "/v1/score": (ScoreRequest,),
    "/v1/rerank": (RerankRequest,),
    "/v2/rerank": (RerankRequest,),
    "/v1/tokenize": (TokenizeText, TokenizeChat),
    "/v1/detokenize": (DetokenizeRequest,),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest,),
    "/v1/uploads": (UploadRequest,),
    "/v1/uploads/{upload_id}/complete": (CompleteUploadRequest,),
}
"""By path, the schemas that a POST's JSON body is read with: one of them."""

NO_JSON = frozenset(
    (
        "/v1/admin/dead_letters/{letter_id}/requeue",
        "/v1/batches/{batch_id}/cancel",
        "/v1/files",
        "/v1/organization/projects/{project_id}/archive",
        "/v1/responses/{response_id}/cancel",
        "/v1/uploads/{upload_id}/cancel",
        "/v1/uploads/{upload_id}/parts",
    )
)
"""Paths whose POST takes no JSON body: none at all, or a form."""

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `app`: every path once, under its full address."""
    found = get_openapi(title="Noria", version=__version__, routes=app.routes)
    paths = {path: item for path, item in found["paths"].items() if _is_canonical(path, found["paths"])}
    kinds = sorted({kind for bodies in BODIES.values() for kind in bodies}, key=lambda kind: kind.__name__)
    references, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    schema_by_kind = {kind: references[kind, "validation"] for kind in kinds}
    known = {name: _with_nulls(schema) for name, schema in definitions.get("$defs", {}).items()}
    for path, item in paths.items():
        for method, operation in item.items():
            if path in _open_paths(app):
                operation["security"] = []
            error = _error("AnthropicError" if path.startswith("/v1/messages") else "Error")
            operation["responses"] = {"200": {"description": "The answer"}, "default": error}
            if method == "post" and path in BODIES:
                schemas = [schema_by_kind[kind] for kind in BODIES[path]]
                schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Noria", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**known, "Error": _ERROR_SCHEMA, "AnthropicError": _ANTHROPIC_ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _error(schema: str) -> dict[str, Any]:
    return {
        "description": "An error in the envelope of the API's dialect",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _with_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with null for every field that may be absent: it means the same."""
    required = schema.get("required", ())
    properties = {
        name: field if name in required or _takes_null(field) else {"anyOf": [field, {"type": "null"}]}
        for name, field in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties} if properties else schema


def _takes_null(field: Mapping[str, Any]) -> bool:
    return field.get("type") == "null" or any(_takes_null(option) for option in field.get("anyOf", ()))


def _open_paths(app: FastAPI) -> tuple[str, ...]:
    """Those that need no key."""
    probes = ("/health", "/healthz", "/readyz")
    return (*probes, "/metrics") if app.state.services.settings.open_metrics else probes


def _is_canonical(path: str, paths: Mapping[str, Any]) -> bool:
    if "/v2/" in path:
        return path.startswith("/v2/")
    return f"/v1{path}" not in paths
