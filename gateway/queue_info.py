"""Where a waiting request stands in its queue, as headers and as comments of an event stream.

Knows no queue's workings and no answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from noria.engine.wire.broker import BrokerUnavailable, GatewayBroker, QueuePosition

_EVERY = 1.0
"""Seconds between two comments."""


class QueueInfo:
    """Of one request; of an answer with several choices the first one's is taken."""

    def __init__(self, broker: GatewayBroker, model_id: str, request_id: str) -> None:
        self._broker = broker
        self._model_id = model_id
        self._request_id = request_id

    async def headers(self) -> dict[str, str]:
        """`x-noria-queue-position` is 0 for a request that waits no more. No eta where none can be told."""
        try:
            found = await self._position()
        except BrokerUnavailable:
            return {}
        if found is None:
            return {"x-noria-queue-position": "0", "x-noria-queue-eta": "0"}
        eta = {} if found.eta_seconds is None else {"x-noria-queue-eta": f"{found.eta_seconds:.1f}"}
        return {"x-noria-queue-position": str(found.ahead + 1), **eta}

    async def comments(self) -> AsyncIterator[bytes]:
        """About one a second for as long as the request waits."""
        while True:
            try:
                found = await self._position()
            except BrokerUnavailable:
                yield b": the store is away; still waiting\n\n"
            else:
                if found is None:
                    return
                eta = "" if found.eta_seconds is None else f" eta={found.eta_seconds:.1f}"
                yield f": queue position={found.ahead + 1}{eta}\n\n".encode()
            await asyncio.sleep(_EVERY)

    async def _position(self) -> QueuePosition | None:
        return await self._broker.position(self._model_id, self._request_id)
