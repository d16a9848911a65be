"""Stores of several servers: how their addresses are spelled, and which server of a cluster holds which key.

    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]/NAME[/DB]     the primary that Sentinels call NAME
    redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]                a cluster that some of these belong to

With `rediss+…` all connections use TLS. Knows no connection and no command's meaning but where its key stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from redis.connection import parse_url
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError

Host = tuple[str, int]
Command = Sequence[Any]

SENTINEL_PORT, REDIS_PORT = 26379, 6379
MAX_REDIRECTS = 5

_CHANNELS = key_slot(b"noria:channels")
"""PUBLISH tells how many listen at the server that was asked, so all that is published or heard goes to one."""

_KEYLESS = frozenset({"PING", "TIME", "INFO", "CONFIG", "WAITAOF", "WAIT"})


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


def by_slot(commands: Sequence[Command]) -> Iterator[tuple[int, list[Command]]]:
    """The commands in their order, those of one slot that follow each other together. What has no key goes along with
    the command before it."""
    slots: list[int] = []
    for command in commands:
        slots.append(_slot(command, slots[-1] if slots else 0))
    for slot, group in groupby(zip(slots, commands, strict=True), key=lambda pair: pair[0]):
        yield slot, [command for _, command in group]


def _slot(command: Command, previous: int) -> int:
    name = command[0]
    if name in _KEYLESS:
        return previous
    if name in ("PUBLISH", "PSUBSCRIBE"):
        return _CHANNELS
    if name in ("EVALSHA", "EVAL"):
        key = command[3]
    elif name == "XREAD":
        key = command[list(command).index("STREAMS") + 1]
    else:
        key = command[1]
    return key_slot(key.encode() if isinstance(key, str) else bytes(key))


class SlotMap:
    """Which server of a cluster holds which slot, as far as one has told. `seeds` are asked first."""

    def __init__(self, seeds: Sequence[Host]) -> None:
        self._seeds = tuple(seeds)
        self._ranges: list[tuple[int, int, Host]] = []
        self._moved: dict[int, Host] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._ranges)

    def candidates(self) -> list[Host]:
        """Whom to ask for the map, the most likely to answer first."""
        return list(dict.fromkeys([*self._seeds, *(host for _, _, host in self._ranges)]))

    def host(self, slot: int) -> Host:
        """Raises redis-py's ConnectionError where nobody has the slot: its server may be about to be replaced."""
        if slot in self._moved:
            return self._moved[slot]
        for first, last, host in self._ranges:
            if first <= slot <= last:
                return host
        self.forget()
        raise RedisConnectionError(f"no server of the cluster has slot {slot}")

    def learn(self, reply: Sequence[Any], asked: Host) -> None:
        """Take in the reply to CLUSTER SLOTS. A server that does not know its own address is the one that was asked."""
        self._moved.clear()
        found = [(int(first), int(last), _named(primary, asked)) for first, last, primary, *_ in reply]
        self._seeds = tuple(dict.fromkeys([*(host for _, _, host in found), *self._seeds]))[:16]
        self._ranges = found

    def follow(self, error: MovedError, asked: Host) -> None:
        """One slot has another server than we thought."""
        self._moved[int(error.slot_id)] = (str(error.host) or asked[0], int(error.port))

    def forget(self) -> None:
        """A server is gone: ask again before the next command."""
        self._ranges, self._moved = [], {}


def _named(primary: Sequence[Any], asked: Host) -> Host:
    name = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
    return (name if name and name != "?" else asked[0]), int(primary[1])
