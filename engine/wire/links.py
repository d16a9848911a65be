"""The way to a store's servers: one server, the primary that Sentinels name, or the servers of a cluster by slot.

Synchronous. Knows no script, and leaves to `slots` whom of a cluster to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import redis
from redis.exceptions import RedisError, ResponseError
from redis.sentinel import Sentinel, SentinelConnectionPool

from noria.engine.wire.nodes import Host, Nodes, parse_nodes
from noria.engine.wire.slots import Command, SlotMap, talk


class Link(Protocol):
    """What `Store` talks through."""

    def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        """Replies in order; a refusal (ResponseError) stands in its place. Raises RedisError and OSError where the
        servers are away."""

    def close(self) -> None: ...


def open_link(url: str, options: dict[str, Any]) -> Link:
    """Connects at the first command. Raises ValueError for an address that cannot be one."""
    nodes = parse_nodes(url)
    if nodes is None:
        return OneServer(redis.ConnectionPool.from_url(url, **options))
    if nodes.kind == "cluster":
        return ClusterLink(nodes, nodes.options | options)
    return PrimaryLink(_primary(nodes, options))


def _primary(nodes: Nodes, options: dict[str, Any]) -> redis.ConnectionPool:
    asking = nodes.sentinel_options | {"ssl": nodes.is_tls} | options
    asking["socket_timeout"] = options["socket_connect_timeout"]  # one that hangs must not hold up the others
    sentinels = Sentinel(nodes.hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    return SentinelConnectionPool(nodes.name, sentinels, ssl=nodes.is_tls, **(nodes.options | options))  # type: ignore[no-untyped-call]


class OneServer:
    """A connection of our own, without the client's pipelines: they cost more than a script's work."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool  # which a connection to a primary asks for its address
        self._connection: Any = pool.make_connection()

    def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        return exchange(self._connection, commands)

    def close(self) -> None:
        self._connection.disconnect()


class PrimaryLink(OneServer):
    """Whose connection must be told to connect: sending alone would not ask the Sentinels where to."""

    def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        self._connection.connect()  # returns at once where there is a connection
        return exchange(self._connection, commands)


def exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:
    """One write, then all replies."""
    connection.send_packed_command([b"".join(connection.pack_commands(commands))])
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(connection.read_response())
        except ResponseError as error:  # the replies behind it are read all the same
            replies.append(error)
    return replies


class ClusterLink:
    """A connection to each server of a cluster."""

    def __init__(self, nodes: Nodes, options: dict[str, Any]) -> None:
        self._slots = SlotMap(nodes.hosts)
        self._options = options
        self._class = redis.SSLConnection if nodes.is_tls else redis.Connection
        self._connections: dict[Host, Any] = {}

    def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        conversation = talk(self._slots, commands)
        try:
            host, asked = next(conversation)
            while True:
                try:
                    replies = exchange(self._connection(host), asked)
                except (RedisError, OSError) as error:
                    host, asked = conversation.throw(error)
                else:
                    host, asked = conversation.send(replies)
        except StopIteration as end:
            return list(end.value)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.disconnect()

    def _connection(self, host: Host) -> Any:
        if host not in self._connections:
            self._connections[host] = self._class(host=host[0], port=host[1], **self._options)
        return self._connections[host]
