"""Who waits and who runs, and how requests move between the two: admission, growth, preemption, leaving.

Keeps both lists and the blocks of the running; chooses no rows. Knows no tensors, no transport, no clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import Policy
from noria.engine.scheduling.preemption import (
    PreemptionCounts,
    Room,
    is_overdue,
    is_protected,
    make_way,
    may_give_way,
)
from noria.engine.scheduling.request import HOLE, Request

WATERMARK = 0.01  # share of the pool that admission leaves free under `paged`, for the running requests to grow into

_order = attrgetter("order")


class Admission:
    """`waiting` and `running` (admitted) requests, each in order of (class, arrival)."""

    def __init__(self, policy: Policy, kv: KVBlocks, max_running: int) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = PreemptionCounts()
        self._policy = policy
        self._kv = kv
        self._max_running = max_running
        self._num_admitted = 0
        self._watermark = max(1, int(kv.num_blocks * WATERMARK))

    def wait(self, request: Request) -> None:
        request.waiting_since = self._num_admitted
        insort(self.waiting, request, key=_order)

    def leave(self, request: Request) -> None:
        self._kv.release(request)
        (self.running if request in self.running else self.waiting).remove(request)

    # --- in ---------------------------------------------------------------------------------------------------------

    def newcomers(self) -> Iterator[Request]:
        """Admit waiting requests one by one, each when it is asked for. One whose next block another is computing is
        passed over: it waits and shares that block. The first other one that does not fit holds up all behind it."""
        if self._policy.closed_batches and self.running:
            return
        was_idle = not self.running  # then nobody has to be left room to grow before the next iteration
        for request in list(self.waiting):
            if len(self.running) >= self._max_running:
                return
            prefix = self._prefix(request)
            if self._is_read_by_another(request, prefix):
                continue
            margin = 0 if was_idle else self._margin(request)
            if self._need(request, prefix) + margin > self._kv.num_free:
                return
            self._enter(request, prefix)
            yield request

    def admit_urgent(self) -> None:
        """Admit waiting requests as long as they are more urgent than somebody who runs; those may have to give way."""
        while self.waiting and self.running and self._policy.preempts:
            request = self.waiting[0]
            if request.class_rank >= self.running[-1].class_rank:
                return
            prefix = self._prefix(request)
            slots = len(self.running) + 1 - self._max_running
            blocks = self._need(request, prefix) + self._margin(request) - self._kv.num_free
            victims = make_way(self.running, self._kv, request.class_rank, slots=slots, blocks=blocks, keep=prefix)
            if victims is None or self._is_read_by_another(request, prefix):
                return
            for victim in victims:
                self.preempt(victim)
            self.preemptions.urgency += len(victims)
            self._enter(request, prefix)

    def _prefix(self, request: Request) -> list[int]:
        return self._kv.cached_prefix(request) if self._shares(request) else []

    def _shares(self, request: Request) -> bool:
        """Whether it may have blocks together with others. With windows, not if its whole output is reserved: what it
        lets go of must be free for what it goes on with."""
        return not (self._policy.reserve_output or (self._kv.is_windowed and is_protected(request)))

    def _is_read_by_another(self, request: Request, prefix: list[int]) -> bool:
        """Whether one before `request` is computing what it would compute next."""
        if not request.reuse_prefix or not self._shares(request):
            return False
        reader = self._kv.reader_after(request, prefix)
        return reader is not None and reader.order < request.order

    def _reserved(self, request: Request) -> int:
        """Tokens that `request` gets blocks for when it is admitted."""
        whole = self._policy.reserve_output or is_protected(request)
        return request.num_total if whole else request.num_tokens

    def _need(self, request: Request, prefix: list[int]) -> int:
        """Free blocks that are used up when `request` is admitted on `prefix`."""
        # Room for one more token than is known: else the first decode might preempt what was just admitted.
        tokens = max(self._reserved(request), min(request.num_tokens + 1, request.num_total))
        groups = self._kv.groups
        computed = len(prefix) // groups.num * groups.block_size
        most = groups.most(tokens, num_computed=computed, at_once=self._at_once(request))
        return most - len(prefix) + prefix.count(HOLE) + self._kv.free_among(prefix)

    def _at_once(self, request: Request) -> int:
        """Tokens of its first iteration, where the token budget does not bind it; else 0."""
        return request.num_tokens if self._policy.whole_prompts else 0

    def _margin(self, request: Request) -> int:
        """Blocks that stay free for the running requests to grow into. Before one that was preempted comes back there
        is one for each of them: as many iterations as a block has tokens pass before anybody needs more."""
        if self._policy.reserve_output:
            return 0
        return self._watermark + (len(self.running) if request.num_preemptions else 0)

    def _enter(self, request: Request, prefix: list[int]) -> None:
        self._kv.take_prefix(request, prefix)
        request.is_private = self._kv.is_windowed and not self._shares(request)
        self._kv.reserve(request, self._reserved(request), self._at_once(request))
        if request.num_preemptions:
            self.preemptions.recomputed += max(0, request.num_lost - request.num_computed)
        else:
            request.num_cached = min(request.num_computed, request.num_prompt)
        if not self._policy.reserve_output:
            self._kv.announce(request)
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        self._num_admitted += 1

    # --- growth and preemption --------------------------------------------------------------------------------------

    def grow(self, request: Request) -> bool:
        """Blocks for the newest token of `request`, taken from those behind it where none are free, the last one first.
        False when it has to wait: it keeps its blocks until somebody before it needs them."""
        return self._grow(request, request.num_tokens)

    def extend(self, request: Request, num_tokens: int) -> int:
        """The same for so many more tokens of a prompt, or as many as there can be blocks for; returns their number."""
        if not self._grow(request, request.num_computed + num_tokens):
            num_tokens = self._kv.room_for(request) - request.num_computed
            self._kv.grow(request, request.num_computed + num_tokens)
        return num_tokens

    def _grow(self, request: Request, num_tokens: int) -> bool:
        self._kv.trim(request)
        missing = self._kv.missing(request, num_tokens)
        while missing > self._kv.num_free:
            victim = next(r for r in reversed(self.running) if r is request or may_give_way(r))
            if victim is request:
                return False
            self.preempt(victim)
            self.preemptions.memory += 1
        self._kv.grow(request, num_tokens)
        return True

    def stretch(self, request: Request, num_tokens: int) -> int:
        """Blocks for `num_tokens` guessed tokens beyond the newest one, as far as they take nobody's, of those who wait
        neither; returns for how many there are."""
        wanted = request.num_tokens + num_tokens
        spare = 0 if self.waiting else max(0, self._kv.num_free - self._watermark)
        if self._kv.missing(request, wanted) > spare:
            return min(num_tokens, request.num_slots - request.num_tokens)
        self._kv.grow(request, wanted)
        return num_tokens

    def preempt(self, request: Request) -> None:
        """Give up a request's blocks; it is computed again when it comes back (recompute, not swap)."""
        request.num_lost = request.num_computed
        request.num_preemptions += 1
        self._kv.release(request)
        self.running.remove(request)
        self.wait(request)

    # --- what may be claimed ----------------------------------------------------------------------------------------

    def room(self) -> Room:
        """What may be claimed, of any class, so that it starts at the next iteration and nobody gives way for it."""
        free = self._free()
        return Room(0, 0) if self.waiting else Room.of(free.requests, free.blocks)

    def rooms(self, num_classes: int) -> list[Room]:
        """`room` for each class. A higher class finds room with those of lower ones as well, and is held up by nobody
        of theirs who waits; but one who was passed over too often holds up everybody."""
        if any(is_overdue(request, self._num_admitted) for request in self.waiting):
            return [Room(0, 0)] * num_classes
        free, highest = self._free(), num_classes
        if self.waiting:
            highest = self.waiting[0].class_rank if self._policy.preempts else 0
        return [
            free.with_way_made(self.running if self._policy.preempts else (), rank) if rank < highest else Room(0, 0)
            for rank in range(num_classes)
        ]

    def _free(self) -> Room:
        if self._policy.closed_batches and self.running:
            return Room(0, 0)
        blocks = self._kv.num_free
        if self.running and not self._policy.reserve_output:
            # What the running prompts still need is spoken for.
            blocks -= self._watermark + sum(self._kv.missing(r, r.num_tokens) for r in self.running)
        return Room(self._max_running - len(self.running), blocks)

    def check(self) -> None:
        """Recount blocks and lists; raises AssertionError where they disagree."""
        self._kv.check(self.running + self.waiting)
        if any(sorted(requests, key=_order) != requests for requests in (self.running, self.waiting)):
            raise AssertionError("requests are out of order")
        if any(r.blocks or r.in_flight for r in self.waiting):
            raise AssertionError("a waiting request holds blocks or is in flight")
        reserved = [r for r in self.running if self._kv.is_windowed and not self._shares(r)]
        if any(self._kv.still_needed(r) > r.num_promised for r in reserved):
            raise AssertionError("less is promised to a request than was reserved for it")
