"""As `links`, for asyncio: pools of connections instead of one, and a client to subscribe with.

Knows no script. Commands over a connection that broke are repeated once, so all of them are idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import redis.asyncio
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.exceptions import RedisError

from noria.engine.wire.nodes import Host, Nodes, parse_nodes
from noria.engine.wire.slots import Command, SlotMap, Talk, look, talk

MAX_CONNECTIONS = 32


class AsyncLink(Protocol):
    """What `AsyncStore` talks through."""

    async def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        """As `Link.round_trip`."""

    async def subscriber(self) -> Any:
        """redis-py's client of the server that everything is published at."""

    async def close(self) -> None: ...


def open_async_link(url: str, options: dict[str, Any], wait: float) -> AsyncLink:
    """Connects at the first command; for a connection of a pool that is busy it waits `wait` seconds. Raises ValueError
    for an address that cannot be one."""
    pool = {"max_connections": MAX_CONNECTIONS, "timeout": wait} | options
    nodes = parse_nodes(url)
    if nodes is None:
        return AsyncOneServer(redis.asyncio.BlockingConnectionPool.from_url(url, **pool))
    if nodes.kind == "cluster":
        return AsyncClusterLink(nodes, nodes.options | pool)
    return AsyncOneServer(_primary(nodes, options, pool))


class _PrimaryPool(SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """Connections to the primary; who wants one more than there are waits."""


def _primary(nodes: Nodes, options: dict[str, Any], pool: dict[str, Any]) -> _PrimaryPool:
    asking = nodes.sentinel_options | {"ssl": nodes.is_tls} | options
    asking["socket_timeout"] = options["socket_connect_timeout"]
    sentinels = Sentinel(nodes.hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    return _PrimaryPool(nodes.name, sentinels, ssl=nodes.is_tls, **(nodes.options | pool))  # type: ignore[no-untyped-call]


class AsyncOneServer:
    def __init__(self, pool: redis.asyncio.ConnectionPool) -> None:
        self._client: Any = redis.asyncio.Redis.from_pool(pool)

    async def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        return await exchange(self._client, commands)

    async def subscriber(self) -> Any:
        return self._client

    async def close(self) -> None:
        await self._client.aclose()


async def exchange(client: Any, commands: Sequence[Command]) -> list[Any]:
    """One pipelined round trip without MULTI."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    return replies


class AsyncClusterLink:
    """A pool of connections to each server of a cluster."""

    def __init__(self, nodes: Nodes, options: dict[str, Any]) -> None:
        self._slots = SlotMap(nodes.hosts)
        self._options = options
        if nodes.is_tls:
            self._options = options | {"connection_class": redis.asyncio.SSLConnection}
        self._clients: dict[Host, Any] = {}

    async def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        return await self._hold(talk(self._slots, commands))

    async def subscriber(self) -> Any:
        await self._hold(look(self._slots))
        return self._client(self._slots.channels)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _hold(self, conversation: Talk) -> list[Any]:
        try:
            host, asked = next(conversation)
            while True:
                try:
                    replies = await exchange(self._client(host), asked)
                except (RedisError, OSError) as error:
                    host, asked = conversation.throw(error)
                else:
                    host, asked = conversation.send(replies)
        except StopIteration as end:
            return list(end.value)

    def _client(self, host: Host) -> Any:
        if host not in self._clients:
            pool = redis.asyncio.BlockingConnectionPool(host=host[0], port=host[1], **self._options)
            self._clients[host] = redis.asyncio.Redis.from_pool(pool)
        return self._clients[host]
