"""An answer that is kept as well as sent.

Knows no shape of an answer and no store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, cast

from noria.engine.wire.messages import Usage
from noria.gateway.answering import Answer
from noria.gateway.choice import Delta
from noria.gateway.errors import GatewayError
from noria.gateway.generation import Generation
from noria.gateway.stored_completions import StoredCompletions


class KeptAnswer(Answer):
    """An answer that is also kept once it is whole, streamed or not, before the client hears its end. `again` makes the
    same answer anew, to have a stream as a whole."""

    def __init__(self, kept: StoredCompletions, tenant: str, request: Mapping[str, Any], again: Callable[[], Answer]):
        self._kept = kept
        self._tenant = tenant
        self._request = request
        self._again = again
        self._answer = again()
        self._deltas: list[Delta] = []

    async def whole(self, generation: Generation) -> dict[str, Any]:
        body = await self._answer.whole(generation)
        await self._kept.keep(self._tenant, self._request, body)
        return body

    def opening(self) -> bytes:
        return self._answer.opening()

    def of(self, deltas: Sequence[Delta]) -> bytes:
        self._deltas += deltas
        return self._answer.of(deltas)

    async def closing(self, usage: Usage) -> bytes:
        body = await self._again().whole(cast(Generation, _Heard(self._deltas, usage)))
        await self._kept.keep(self._tenant, self._request, {**body, "object": "chat.completion"})
        return await self._answer.closing(usage)

    def failed(self, error: GatewayError) -> bytes:
        return self._answer.failed(error)


class _Heard:
    """A generation that is over, as far as making an answer of it needs one."""

    def __init__(self, deltas: Sequence[Delta], usage: Usage) -> None:
        self._deltas = deltas
        self._usage = usage
        self.num_choices = 1 + max((delta.index for delta in deltas), default=0)

    async def deltas(self) -> AsyncIterator[Sequence[Delta]]:
        yield self._deltas

    def usage(self) -> Usage:
        return self._usage
