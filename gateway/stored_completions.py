"""Chat completions that clients asked to have kept: written when an answer is whole, found again by their ids.

Knows no HTTP and no field of an answer but its id, its model and its usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import structlog

from noria.engine.wire.broker import BrokerUnavailable
from noria.engine.wire.record_store import RecordsFull, RecordStore
from noria.gateway.errors import NotFound
from noria.gateway.records import CHAT_COMPLETION

log = structlog.get_logger(__name__)

_PAGE = 100

_ASKED = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "tools", "tool_choice", "response_format",
)  # fmt: skip
"""What a kept completion repeats of its request, as OpenAI's do; null where it was not given."""


class StoredCompletions:
    """`life` is in seconds. All methods raise BrokerUnavailable but `keep`, since an answer is worth more than its
    record."""

    def __init__(self, records: RecordStore, life: float) -> None:
        self._records = records
        self._life = life

    async def keep(self, tenant: str, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """An answer and the request (as it was sent) that it is the answer to. `answer` is a whole one."""
        completion = {
            **answer,
            **{name: request.get(name) for name in _ASKED},
            "input_user": request.get("user"),
            "input_messages": request["messages"],
            "metadata": request.get("metadata") or {},
        }
        body = orjson.dumps(completion)
        try:
            await self._records.put(tenant, CHAT_COMPLETION, answer["id"], body, created=time.time(), ttl=self._life)
        except (BrokerUnavailable, RecordsFull) as error:
            log.error("a chat completion could not be kept", id=answer["id"], error=str(error))

    async def find(self, tenant: str, completion_id: str) -> dict[str, Any]:
        """The completion. Raises `NotFound`."""
        return (await self._get(tenant, completion_id))[0]

    async def messages(self, tenant: str, completion_id: str) -> list[dict[str, Any]]:
        """What the assistant said in it, each message with an id: its turns in the request and the choices of the
        answer. Raises `NotFound`.

        OpenAI's schema of these messages knows the assistant's role alone, though an example beside it shows a user's;
        strict clients hold to the schema. The others are the completion's own `input_messages`.
        """
        completion = await self.find(tenant, completion_id)
        said = [*completion["input_messages"], *(choice["message"] for choice in completion["choices"])]
        numbered = enumerate(said)
        return [_shown(completion_id, place, given) for place, given in numbered if given["role"] == "assistant"]

    async def replace_metadata(self, tenant: str, completion_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """The completion as it is now. Raises `NotFound`."""
        while True:
            found, version = await self._get(tenant, completion_id)
            completion = {**found, "metadata": dict(metadata)}
            body = orjson.dumps(completion)
            if await self._records.replace_if(tenant, CHAT_COMPLETION, completion_id, version, body):
                return completion

    async def delete(self, tenant: str, completion_id: str) -> None:
        """Raises `NotFound`."""
        if "/" in completion_id or not await self._records.delete(tenant, CHAT_COMPLETION, completion_id):
            raise _not_found(completion_id)

    async def page(
        self, tenant: str, wanted: Callable[[dict[str, Any]], bool], *, after: str | None, limit: int, descending: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        """Up to `limit` completions that are wanted, and whether there are more. Raises KeyError where `after` is not
        known."""
        listed: list[dict[str, Any]] = []
        more = True
        while more:
            found, more = await self._records.page(
                tenant, CHAT_COMPLETION, after=after, limit=_PAGE, descending=descending
            )
            for record in found:
                after = record.id
                completion = orjson.loads(record.body)
                if wanted(completion):
                    if len(listed) == limit:
                        return listed, True
                    listed.append(completion)
        return listed, False

    async def _get(self, tenant: str, completion_id: str) -> tuple[dict[str, Any], str]:
        record = None if "/" in completion_id else await self._records.get(tenant, CHAT_COMPLETION, completion_id)
        if record is None:
            raise _not_found(completion_id)
        return orjson.loads(record.body), record.version


def _shown(completion_id: str, place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    content = given.get("content")
    parts = content if isinstance(content, list) else None
    return {
        "name": None,
        **given,
        "id": f"{completion_id}-{place}",
        "content": "".join(part.get("text", "") for part in parts) if parts is not None else content,
        "content_parts": parts,
        "refusal": given.get("refusal"),
    }


def _not_found(completion_id: str) -> NotFound:
    what = f"No chat completion found with id '{completion_id[:128]}'"
    return NotFound(f"{what}: only those created with 'store': true are kept.", param="completion_id")
