"""Makes a conversation short: the user's messages stay, the rest becomes a summary by the model.

Knows the generation path; no HTTP and no store.
"""

from __future__ import annotations

import time
from typing import Any

from noria.engine.wire.messages import Usage
from noria.gateway.collect import collect
from noria.gateway.responses import ids, response
from noria.gateway.responses.asking import ask
from noria.gateway.responses.context import Context
from noria.gateway.responses.items import compacted
from noria.gateway.responses.parts import Shown
from noria.gateway.schemas.responses import CompactRequest, ResponseRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.services import Services, Tenant

_INSTRUCTION = (
    "Summarise the conversation so far, so that it can be continued from your summary alone: what was asked, what was "
    "found and decided, and what is still to do. Keep names, numbers and ids."
)
_MAX_TOKENS = 512


async def compact(services: Services, tenant: Tenant, request: CompactRequest, context: Context) -> Shown:
    """The compaction object. Raises a `GatewayError`."""
    group, created = ids.new_group(), int(time.time())
    items = [*context.history, *context.own_items(group)]
    summary, usage = (
        await _summary(services, tenant, request, items, context.files, group) if items else ("", Usage(0, 0))
    )
    carried = {
        "id": ids.output_item(group, "compaction", 0),
        "type": "compaction",
        "encrypted_content": compacted(summary),
    }
    return {
        "id": ids.RESPONSE + group,
        "object": "response.compaction",
        "created_at": created,
        "output": [*(item for item in items if item.get("role") == "user"), carried],
        "usage": response.usage_fields(usage),
    }


async def _summary(
    services: Services,
    tenant: Tenant,
    request: CompactRequest,
    items: list[Shown],
    files: dict[str, str],
    group: str,
) -> tuple[str, Usage]:
    card = (await services.directory.resolve(request.model)).card
    asked: dict[str, Any] = {
        "model": request.model,
        "input": "",
        "instructions": request.instructions,
        "service_tier": request.service_tier,
        "max_output_tokens": max(16, min(_MAX_TOKENS, card.max_model_len // 4)),
        "temperature": 0.0,
        "truncation": "auto",
    }
    last = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _INSTRUCTION}]}
    question = await ask(services, parse(ResponseRequest, asked), [*items, last], files)
    services.directory.require_live(question.model)
    async with services.generation(tenant, question, group, None) as generation:
        (choice,) = await collect(generation)
    return choice.text.strip(), generation.usage()
