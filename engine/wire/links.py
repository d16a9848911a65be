"""The way to a store's servers: one server, the primary that Sentinels name, or the servers of a cluster by slot.

Synchronous. Knows no script and repeats nothing but what a server of a cluster refused as not its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import redis
from redis.exceptions import MovedError, RedisError, ResponseError
from redis.sentinel import Sentinel, SentinelConnectionPool

from noria.engine.wire.nodes import MAX_REDIRECTS, Command, Host, Nodes, SlotMap, by_slot, parse_nodes


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
    """Commands keep their order across servers: those of one slot go in one round trip, the next slot's after it."""

    def __init__(self, nodes: Nodes, options: dict[str, Any]) -> None:
        self._slots = SlotMap(nodes.hosts)
        self._options = options
        self._class = redis.SSLConnection if nodes.is_tls else redis.Connection
        self._connections: dict[Host, Any] = {}

    def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        try:
            return [reply for slot, run in by_slot(commands) for reply in self._run(slot, run)]
        except (RedisError, OSError):
            self._slots.forget()
            raise

    def _run(self, slot: int, commands: list[Command]) -> list[Any]:
        self._look()
        asked = self._slots.host(slot)
        replies = exchange(self._connection(asked), commands)
        for _ in range(MAX_REDIRECTS):
            refused = [place for place, reply in enumerate(replies) if isinstance(reply, MovedError)]
            if not refused:
                break
            self._slots.follow(replies[refused[0]], asked)
            asked = self._slots.host(slot)
            again = exchange(self._connection(asked), [commands[place] for place in refused])
            for place, reply in zip(refused, again, strict=True):
                replies[place] = reply
        return replies

    def _look(self) -> None:
        if self._slots.is_known:
            return
        trouble: Exception | None = None
        for host in self._slots.candidates():
            try:
                (reply,) = exchange(self._connection(host), [("CLUSTER", "SLOTS")])
                if isinstance(reply, ResponseError):
                    raise reply
                return self._slots.learn(reply, host)
            except (RedisError, OSError) as error:
                trouble = error
        assert trouble is not None  # there is one candidate at least
        raise trouble

    def _connection(self, host: Host) -> Any:
        if host not in self._connections:
            self._connections[host] = self._class(host=host[0], port=host[1], **self._options)
        return self._connections[host]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.disconnect()
