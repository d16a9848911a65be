"""Which server of a cluster has which slot, and a round trip to a cluster as a talk: whom to ask what, and then whom.

Knows no connection, and no command's meaning but where its key stands. `links` and `async_links` do the asking.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import groupby
from typing import Any

from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError, ResponseError

from noria.engine.wire.nodes import Host

Command = Sequence[Any]
Talk = Generator[tuple[Host, Sequence[Command]], list[Any], list[Any]]
"""Yields whom to ask what, and is sent the replies (refusals, ResponseError, in their places); or is thrown what kept
them from coming. Returns the replies to the whole."""

MAX_REDIRECTS = 5

_CHANNELS = key_slot(b"noria:channels")
"""PUBLISH tells how many listen at the server that was asked, so all that is published or heard goes to one."""

_KEYLESS = frozenset({"PING", "TIME", "INFO", "CONFIG", "WAITAOF", "WAIT"})


def talk(slots: SlotMap, commands: Sequence[Command]) -> Talk:
    """Commands keep their order across servers: those of one slot go in one exchange, the next slot's after it. Repeats
    nothing but what a server refused as not its own. A slot that is being moved is away until it is there: the keys
    that scripts are given are prefixes, which no server has, so none is begun on half of a slot."""
    replies: list[Any] = []
    try:
        for slot, run in by_slot(commands):
            yield from look(slots)
            replies += yield from _run(slots, slot, run)
    except (RedisError, OSError):
        slots.forget()
        raise
    return replies


def look(slots: SlotMap) -> Talk:
    """See to it that the map is known."""
    trouble: Exception | None = None
    for host in [] if slots.is_known else slots.candidates():
        try:
            (reply,) = yield host, [("CLUSTER", "SLOTS")]
            if isinstance(reply, ResponseError):
                raise reply
            slots.learn(reply, host)
            return []
        except (RedisError, OSError) as error:
            trouble = error
    if trouble is not None:
        raise trouble
    return []


def _run(slots: SlotMap, slot: int, commands: list[Command]) -> Talk:
    asked = slots.host(slot)
    replies = yield asked, commands
    for _ in range(MAX_REDIRECTS):
        refused = [place for place, reply in enumerate(replies) if isinstance(reply, MovedError)]
        if not refused:
            break
        slots.follow(replies[refused[0]], asked)
        asked = slots.host(slot)
        again = yield asked, [commands[place] for place in refused]
        for place, reply in zip(refused, again, strict=True):
            replies[place] = reply
    return replies


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

    @property
    def channels(self) -> Host:
        """The server that everything is published at."""
        return self.host(_CHANNELS)


def _named(primary: Sequence[Any], asked: Host) -> Host:
    name = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
    return (name if name and name != "?" else asked[0]), int(primary[1])
