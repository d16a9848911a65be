"""What was used: counts by minute, hour or day as they were posted, and the ledger's entries one by one.

Knows how the books lie in the store; no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from noria.engine.wire.connection import AsyncStore
from noria.gateway.tenancy import names
from noria.gateway.tenancy.ledger import WIDTHS, kept_entry, of_group

_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose requests were counted together, and of what kind."""

    project: str
    key: str
    model: str
    service_class: str


@dataclass(slots=True)
class Counts:
    """`cost` is in billionths of a US dollar."""

    requests: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0
    cost: int = 0

    def add(self, other: Counts) -> None:
        self.requests += other.requests
        self.input += other.input
        self.cached += other.cached
        self.output += other.output
        self.cost += other.cost


@dataclass(frozen=True, slots=True)
class Bucket:
    """Counts of one stretch of time, by what was asked to tell apart. Times are Unix seconds."""

    start: int
    end: int
    counts: dict[tuple[str, ...], Counts]


class Usage:
    """All methods raise BrokerUnavailable."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store

    async def organizations(self) -> list[str]:
        """Ids of all of them."""
        (ids,) = await self._store.run(("SMEMBERS", names.ORGANIZATIONS))
        return sorted(i.decode() for i in ids)

    async def buckets(
        self,
        organization_id: str,
        width: str,
        starts: Sequence[int],
        *,
        among: Callable[[Origin], bool],
        by: Callable[[Origin], tuple[str, ...]],
    ) -> list[Bucket]:
        """Of requests that are `among`, summed up `by`; one bucket for each start, in that order."""
        if not starts:
            return []
        found = await self._store.run(*(("HGETALL", names.usage(organization_id, width, start)) for start in starts))
        return [
            Bucket(start, start + WIDTHS[width], _summed(flat, among, by))
            for start, flat in zip(starts, found, strict=True)
        ]

    async def entries(self, organization_id: str, start_ms: int, end_ms: int) -> AsyncIterator[dict[str, Any]]:
        """Entries of the ledger that were posted between two moments, the oldest first."""
        after = str(start_ms)
        while True:
            (found,) = await self._store.run(
                ("XRANGE", names.ledger(organization_id), after, end_ms, "COUNT", _AT_ONCE)
            )
            for _, flat in found:
                yield kept_entry(flat)
            if len(found) < _AT_ONCE:
                return
            after = f"({found[-1][0].decode()}"


def _summed(
    flat: Any, among: Callable[[Origin], bool], by: Callable[[Origin], tuple[str, ...]]
) -> dict[tuple[str, ...], Counts]:
    counts: dict[tuple[str, ...], Counts] = {}
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    for name, value in pairs:
        origin = Origin(*of_group(name.decode()))
        if among(origin):
            counts.setdefault(by(origin), Counts()).add(Counts(*map(int, value.split())))
    return dict(sorted(counts.items()))
