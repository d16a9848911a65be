"""Stores of several servers: how their addresses are spelled.

    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]/NAME[/DB]     the primary that Sentinels call NAME
    redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]                a cluster that some of these belong to

With `rediss+…` all connections use TLS. Knows no connection and no command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from redis.connection import parse_url

Host = tuple[str, int]

SENTINEL_PORT, REDIS_PORT = 26379, 6379


@dataclass(frozen=True, slots=True)
class Nodes:
    """What an address of several servers says. `options` are redis-py's for a connection to a server that keeps keys,
    `sentinel_options` for one to a Sentinel. `name` is what Sentinels call the primary."""

    kind: Literal["sentinel", "cluster"]
    hosts: tuple[Host, ...]
    name: str
    is_tls: bool
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def parse_nodes(url: str) -> Nodes | None:
    """None: the address of one server. Raises ValueError, which repeats no password."""
    parts = urlsplit(url)
    scheme, plus, kind = parts.scheme.partition("+")
    if not plus:
        return None
    if scheme not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        raise ValueError("it begins with redis+sentinel://, redis+cluster:// or the same with rediss")
    userinfo, at, hosts = parts.netloc.rpartition("@")
    name, _, db = parts.path.strip("/").partition("/")
    if kind == "cluster":
        name, db = "", name
        if db not in ("", "0"):
            raise ValueError("a cluster has no database but 0")
    elif not name:
        raise ValueError("it ends with the name that the Sentinels know the primary by: …/mymaster")
    parse: Any = parse_url  # redis-py's, and untyped
    options: dict[str, Any] = parse(f"{scheme}://{userinfo}{at}x/{db}?{parts.query}")
    for given in ("host", "connection_class"):
        options.pop(given, None)
    sentinel = {key.removeprefix("sentinel_"): options.pop(key) for key in list(options) if key.startswith("sentinel_")}
    sentinel |= {key: value for key, value in options.items() if key.startswith("ssl_")}
    port = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
    found = tuple(_host(text, port) for text in hosts.split(",") if text)
    if not found:
        raise ValueError("it names no host")
    is_tls = scheme == "rediss"
    if kind == "sentinel":
        return Nodes("sentinel", found, unquote(name), is_tls, options, sentinel)
    return Nodes("cluster", found, "", is_tls, options, {})


def _host(text: str, port: int) -> Host:
    if text.startswith("["):  # an IPv6 address
        host, _, rest = text[1:].partition("]")
        text_port = rest.removeprefix(":")
    else:
        host, _, text_port = text.partition(":")
    if not host or (text_port and not text_port.isdigit()):
        raise ValueError(f"{text} is no HOST:PORT")
    return unquote(host), int(text_port or port)
