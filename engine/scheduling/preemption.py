"""Who gives way to whom when slots or blocks are short, and for how long that may go on.

Reads requests and counts blocks; moves nothing. `scheduler.py` acts on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.request import Request

MAX_PREEMPTIONS = 4
"""Times that a request is preempted at most. After the last time it comes back only with blocks for its whole output,
which nobody can take from it again: so it ends, however short memory is."""

MAX_PASSED_OVER = 32
"""Requests that may be admitted while another one waits here. After that nothing is claimed until it has its turn."""


@dataclass(slots=True)
class PreemptionCounts:
    """Since the start."""

    memory: int = 0  # requests that lost their blocks so that an earlier or more urgent one could grow
    urgency: int = 0  # requests that lost their slot or blocks to one of a higher class that came in
    recomputed: int = 0  # tokens computed again, because they were not found in the prefix cache on return

    @property
    def total(self) -> int:
        return self.memory + self.urgency


def is_protected(request: Request) -> bool:
    """True for one that has been preempted often enough."""
    return request.num_preemptions >= MAX_PREEMPTIONS


def may_give_way(request: Request) -> bool:
    return not request.in_flight and not is_protected(request)


def is_overdue(request: Request, num_admitted: int) -> bool:
    """Whether too many others were admitted since `request` began to wait."""
    return num_admitted - request.waiting_since >= MAX_PASSED_OVER


def lower_classes(running: Sequence[Request], class_rank: int) -> Iterator[Request]:
    """Who may have to give way to a newcomer of `class_rank`, those in flight once they are back: the lowest class
    first, in it the latest arrival."""
    for request in reversed(running):
        if request.class_rank <= class_rank:
            return
        if not is_protected(request):
            yield request


def make_way(
    running: Sequence[Request], kv: KVBlocks, class_rank: int, *, slots: int, blocks: int, keep: Sequence[int]
) -> list[Request] | None:
    """The first of `lower_classes` that free `slots` slots and `blocks` blocks together, blocks in `keep` not counted;
    None when all of them would not do. Nobody has to give way in vain."""
    if slots <= 0 and blocks <= 0:
        return []
    chosen: list[Request] = []
    victims = (request for request in lower_classes(running, class_rank) if not request.in_flight)
    for victim, freed in kv.freed_by(victims, keep):
        chosen.append(victim)
        if len(chosen) >= slots and freed >= blocks:
            return chosen
    return None


@dataclass(frozen=True, slots=True)
class Room:
    """What may be claimed from the queue now."""

    requests: int
    blocks: int

    @staticmethod
    def of(requests: int, blocks: int) -> Room:
        return Room(requests, blocks) if requests > 0 and blocks > 0 else Room(0, 0)

    def with_way_made(self, running: Sequence[Request], class_rank: int) -> Room:
        """What there is for `class_rank` once everybody lower has given way. Blocks that a victim took from the prefix
        cache are left out: others may hold them. It is an estimate: who is claimed on it may have to wait."""
        requests, blocks = self.requests, self.blocks
        for victim in lower_classes(running, class_rank):
            requests += 1
            blocks += victim.num_own_blocks
        return Room.of(requests, blocks)
