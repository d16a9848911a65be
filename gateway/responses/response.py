"""The response object: what was asked, as it is shown, and what came of it.

Knows no store and no tokens.
"""

from __future__ import annotations

import time
from typing import Any

from noria.engine.wire.messages import Usage
from noria.gateway.choice import Ended
from noria.gateway.errors import GatewayError, InvalidRequest, RateLimited
from noria.gateway.responses.parts import Shown
from noria.gateway.schemas.platform import moderated
from noria.gateway.schemas.responses import ResponseRequest


def begun(request: ResponseRequest, *, response_id: str, model: str, created: int) -> Shown:
    """A response at its beginning."""
    response: Shown = {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "queued" if request.background else "in_progress",
        "background": request.background,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": _reasoning(request),
        "safety_identifier": request.safety_identifier,
        "service_tier": "default" if request.service_tier == "auto" else request.service_tier,
        "store": request.store,
        "temperature": request.temperature,
        "text": _text(request),
        "tool_choice": _plain(request.tool_choice),
        "tools": [_tool(tool.model_dump(by_alias=True, exclude_none=True)) for tool in request.tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation,
        "usage": usage_fields(Usage(0, 0)),  # not null: OpenAI's schema has none here, and Open Responses wants one
        "metadata": request.metadata,
    }
    if request.user is not None:
        response["user"] = request.user
    if request.conversation is not None:
        response["conversation"] = {"id": request.conversation.id}
    if request.prompt_cache_options is not None:
        response["prompt_cache_options"] = {"mode": "implicit", "ttl": "30m"}
    if request.image is not None:
        response["image"] = {"context_compression": "disabled"}
    if request.moderation is not None:
        response["moderation"] = moderated()
    return response


def ended(response: Shown, output: list[Shown], usage: Usage, finish: Ended | None) -> Shown:
    """The response with its output. One that ran out of tokens is incomplete."""
    cut = finish == "length"
    return {
        **response,
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": usage_fields(usage),
    }


def rewound(kept: Shown) -> Shown:
    """The response as it was at its beginning."""
    none: Shown = {
        "output": [],
        "usage": usage_fields(Usage(0, 0)),
        "completed_at": None,
        "incomplete_details": None,
        "error": None,
    }
    return {**kept, "status": "queued" if kept["background"] else "in_progress", **none}


def failed(response: Shown, error: GatewayError) -> Shown:
    """The response that broke off."""
    code = "server_error"
    if isinstance(error, RateLimited):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    return {**response, "status": "failed", "error": {"code": code, "message": error.message}}


def usage_fields(usage: Usage) -> Shown:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _reasoning(request: ResponseRequest) -> Shown:
    given = request.reasoning
    shown: Shown = {"effort": given.effort if given else None, "summary": None}
    if given is not None:
        shown |= given.model_dump(exclude_none=True)
        if given.context is not None:
            shown["context"] = "all_turns" if given.context == "all_turns" else "current_turn"
    return shown


def _text(request: ResponseRequest) -> Shown:
    given = request.text.format
    kept = given.model_dump(by_alias=True, exclude_none=True)
    if given.type == "json_schema":
        kept = {"description": None, "strict": False, **kept}
    return {"format": kept, "verbosity": request.text.verbosity or "medium"}


def _tool(given: Shown) -> Shown:
    return {"description": None, "parameters": None, "strict": False, **given}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(exclude_none=True)
