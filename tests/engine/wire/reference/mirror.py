"""Stands before a store and does to the reference whatever reaches the pool: every reply has to be the reference's.

Knows the scripts' arguments; not who sends them, nor why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from noria.engine.wire import connection
from noria.engine.wire.connection import Command
from noria.engine.wire.messages import CLASSES, decode_frame
from tests.engine.wire.reference.claiming import Rules
from tests.engine.wire.reference.contents import rounded, split
from tests.engine.wire.reference.pool import Pool
from tests.engine.wire.reference.requests import Request


class Runs(Protocol):
    def run(self, *commands: Command) -> list[Any]: ...


class Mirror:
    """`pool` is the reference; `prefix` is that of its keys. Commands on other keys pass."""

    def __init__(self, store: Runs, pool: Pool, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.pool = pool
        self._scripts: dict[str, Callable[..., Any]] = {
            connection.ENQUEUE.sha: self._enqueue,
            connection.CANCEL.sha: self._cancel,
            connection.CLAIM.sha: self._claim,
            connection.PROGRESS.sha: self._progress,
            connection.RELEASE.sha: self._release,
            connection.LEASE.sha: self._lease,
            connection.SNAPSHOT.sha: self._snapshot,
            connection.POSITION.sha: self._position,
        }

    def run(self, *commands: Command) -> list[Any]:
        replies = self._store.run(*commands)
        for command, reply in zip(commands, replies, strict=True):
            if command[0] == "EVALSHA" and command[1] in self._scripts:
                work = self._scripts[command[1]]
                expected = work(*command[4:])
                if not _agree(expected, reply):
                    name = work.__name__.removeprefix("_").upper()
                    raise AssertionError(f"{name} {command[4:]}: {expected!r} expected, not {reply!r}")
            elif command[:2] == ("HDEL", self._prefix + "endings"):
                for request_id in command[2:]:
                    self.pool.endings.pop(request_id.decode(), None)
        return replies

    def _enqueue(self, request_id: str, body: bytes, *rest: Any) -> list[object]:
        service_class, tenant, gateway, cost, block_size, prompt, tokens, weight, deadline, priority, logged = rest[:11]
        request = Request(
            request_id, body, service_class, tenant, gateway, cost, block_size, prompt, tokens, weight,
            None if deadline == "" else deadline, priority, bool(logged), *rest[15:],
            accepted=self.pool.now, since=self.pool.now,
        )  # fmt: skip
        return self.pool.enqueue(request, rest[11:15])

    def _cancel(self, request_id: str, counted: int | str, why: str) -> list[object]:
        return self.pool.cancel(request_id, counted if isinstance(counted, int) else None, why)

    def _progress(self, engine: str, frames: bytes, _kept: int, *folds: Any) -> int:
        pieces = [one for packed in (frames, *folds[3::4]) for one in split(packed)]
        return self.pool.record(engine, [(one, decode_frame(one[4:])) for one in pieces])

    def _claim(
        self, engine: str, lease: int, slots: str, blocks: str, stats: bytes, resync: int, lookahead: int, max_age: int,
        max_passed: int, max_left: int, num_finished: int, *rest: Any,
    ) -> list[object]:  # fmt: skip
        ends, known = rest[: 4 * num_finished], rest[4 * num_finished :]
        return self.pool.claim(
            engine,
            lease,
            (_by_class(slots), _by_class(blocks)),
            stats,
            list(zip(ends[::4], ends[1::4], ends[2::4], ends[3::4], strict=True)),
            known if resync else None,
            Rules(lookahead, max_age, max_passed, max_left),
        )

    def _release(self, only: str, deaths: int, max_deaths: int, _length: int, error: str, *_: int) -> Any:
        if only:
            return self.pool.release(only, deaths > 0, max_deaths, error)
        requeued, buried, endings = self.pool.reap(max_deaths, error)
        return [requeued, buried, _InAnyOrder(endings)]

    def _lease(self, engine: str, ms: int, take: int, _card_ttl: int, life: str) -> int:
        return self.pool.lease(engine, ms, life, take=bool(take))

    def _snapshot(self) -> list[object]:
        live = {e: lease.stats for e, lease in self.pool.leases.items() if lease.expires >= self.pool.now}
        by_expiry = sorted(live, key=lambda e: (self.pool.leases[e].expires, e))
        engines = [field for engine in by_expiry for field in (engine, live[engine])]
        return [_ANY, engines, self.pool.depths(), sum(r.tokens for r in self.pool.waiting())]

    def _position(self, request_id: str) -> object:
        try:
            ahead = self.pool.position(request_id)
        except LookupError:
            return _ANY
        return None if ahead is None else [ahead, _ANY, self.pool.drain.rate or 0.0]


class _InAnyOrder(list[Any]):
    """A hash's values come in no order of their own."""


_ANY = object()


def _by_class(numbers: str) -> list[int]:
    """One number for all classes, or one for each."""
    each = [int(number) for number in numbers.split()]
    return each if len(each) > 1 else each * len(CLASSES)


def _agree(expected: Any, reply: Any) -> bool:
    if expected is _ANY:
        return True
    if isinstance(expected, _InAnyOrder):
        return _agree(sorted(expected, key=_first), sorted(reply, key=_first))
    if isinstance(expected, list):
        same_length = isinstance(reply, Sequence) and len(expected) == len(reply)
        return same_length and all(map(_agree, expected, reply))
    if isinstance(expected, float):
        return rounded(expected) == rounded(float(reply))
    return (expected.encode() if isinstance(expected, str) else expected) == reply


def _first(items: Iterable[Any]) -> bytes:
    first = next(iter(items))
    return first.encode() if isinstance(first, str) else first
