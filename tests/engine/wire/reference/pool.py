"""A pool in plain Python, as docs/broker.md has it: who waits, who runs, what is owed. One method for each script.

What can be derived from the requests (lines, counts, what an engine holds) is derived, not kept. Knows no key and no
client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.engine.wire.messages import CLASSES, TokenFrame
from tests.engine.wire.reference import ledger
from tests.engine.wire.reference.claiming import Claim, Rules, Standing
from tests.engine.wire.reference.drain import Drain
from tests.engine.wire.reference.requests import Request, ending
from tests.engine.wire.reference.turns import Turns, line_of


@dataclass
class Lease:
    expires: int  # ms
    life: str
    trial: str = ""  # the suspect that it tries
    to_cancel: list[str] = field(default_factory=list)
    stats: bytes = b""
    standing: Standing | None = None  # what it said with its last claim beside others


@dataclass
class Pool:
    """`endings` are of requests that ended in the store and whose last frame is not known to be published."""

    now: int
    requests: dict[str, Request] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    holdings: dict[str, list[str]] = field(default_factory=dict)  # by engine, in the order in which it claimed them
    turns: Turns = field(default_factory=Turns)
    arrivals: int = 0
    bell: bool = False
    drain: Drain = field(default_factory=Drain)
    endings: dict[str, list[object]] = field(default_factory=dict)
    dead: list[tuple[str, int, str, str]] = field(default_factory=list)  # id, attempts, engines, error
    ledger: list[dict[str, str]] = field(default_factory=list)

    def waiting(self) -> list[Request]:
        return [r for r in self.requests.values() if r.waits]

    def held(self, engine: str) -> list[Request]:
        return [self.requests[i] for i in self.holdings.get(engine, ())]

    # --- gateways ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request, limits: Sequence[int]) -> list[object]:
        """`limits`: requests and bytes in the pool, requests and bytes of one tenant."""
        if request.id in self.requests:
            return ["known"]
        max_depth, max_bytes, max_of_tenant, max_bytes_of_tenant = limits
        waiting, size, rate = self.waiting(), len(request.body), self.drain.rate or 0.0
        mine = [r for r in waiting if r.tenant == request.tenant]
        tokens = float(sum(r.tokens for r in waiting))
        if len(mine) >= max_of_tenant or _bytes(mine) + size > max_bytes_of_tenant:
            sharers = {r.tenant for r in waiting if r.queued and r.service_class == request.service_class}
            ahead = min(tokens, float(sum(r.tokens for r in mine)) * max(1, len(sharers)))
            return ["tenant_full", len(mine), ahead, rate]
        if len(waiting) >= max_depth or _bytes(waiting) + size > max_bytes:
            return ["full", len(waiting), tokens, rate]
        self.arrivals += 1
        request.arrival = self.arrivals
        self.requests[request.id] = request
        self.turns.join(request)
        self.bell = True
        return ["queued", len(waiting) + 1]

    def cancel(self, request_id: str, counted: int | None, why: str) -> list[object]:
        """One that waits ends at once; who runs it is told once. `counted` and `why` are for the ledger."""
        request = self.requests.get(request_id)
        if request is None:
            return ["unknown"]
        request.counted = request.counted if counted is None else counted
        request.why = why or request.why
        if request.waits:
            last = self._end_waiting(request, "cancelled")
            self._settle()
            return ["queued", last]
        if not request.cancelled:
            request.cancelled = self.bell = True
            self.leases[request.engine].to_cancel.append(request_id)
        return ["running"]

    def reap(self, max_deaths: int, error: str) -> list[object]:
        """Of every engine past its lease. What others left unpublished is in the reply too."""
        requeued = buried = 0
        for engine, lease in sorted(self.leases.items(), key=lambda item: (item[1].expires, item[0])):
            if lease.expires < self.now:
                back, dead, _ = self._let_go(engine, True, max_deaths, error)
                requeued, buried = requeued + back, buried + dead
        self._expire()
        return self._released(requeued, buried, list(self.endings.values()))

    # --- engines ----------------------------------------------------------------------------------------------------

    def lease(self, engine: str, ms: int, life: str, *, take: bool) -> int:
        if take:
            self.leases[engine] = Lease(0, life)
        elif engine not in self.leases:
            return 0
        self.leases[engine].expires = self.now + ms
        return 1

    def record(self, engine: str, frames: Sequence[tuple[bytes, TokenFrame]]) -> int:
        """A suspect that has survived a token is none any more."""
        if engine not in self.leases:
            return 0
        for encoded, frame in frames:
            held = frame.request_id in self.holdings.get(engine, ())
            if held and self.requests[frame.request_id].record(encoded, frame):
                trial = self.leases[engine].trial
                if frame.token_ids and trial == frame.request_id:
                    self.leases[engine].trial, self.requests[trial].suspect = "", False
        return 1

    def claim(
        self,
        engine: str,
        ms: int,
        room: tuple[Sequence[int], Sequence[int]],
        stats: bytes,
        finished: Sequence[tuple[str, int, int, str]],
        known: Sequence[str] | None,
        rules: Rules,
    ) -> list[object]:
        """`room`: slots and blocks by class. `finished`: (id, epoch, output tokens, details for the ledger).
        `known`: what the engine knows that it holds, after a lost reply."""
        lease = self.leases.get(engine)
        if lease is None:
            return [0]
        lease.expires, lease.stats = self.now + ms, stats or lease.stats
        drained = sum(self._finish(engine, *one) for one in finished)
        if drained:
            self.drain.note(self.now, drained)
        cancelled, lease.to_cancel = lease.to_cancel, []
        again, fenced = [], []
        if known is not None:
            mine = self.held(engine)
            fenced = [i for i in known if i not in [r.id for r in mine]]
            again = [r for r in mine if r.id not in known]
            cancelled = cancelled + [r.id for r in mine if r.cancelled]
        endings = self._expire()
        taken = self._take(engine, lease, room, rules)
        if finished or endings or taken or again:
            self._settle()
        return [1, [_handed_over(r) for r in again + taken], cancelled, endings, fenced]

    def _take(
        self, engine: str, lease: Lease, room: tuple[Sequence[int], Sequence[int]], rules: Rules
    ) -> list[Request]:
        claim = Claim(self.waiting(), self.turns, *room, rules, self.now, len(self.held(engine)), self._others(engine))
        if not lease.trial:
            suspect = claim.try_suspects()
            lease.trial = suspect.id if suspect else ""
        claim.take_turns()
        for request in claim.taken:
            request.engine, request.epoch, request.misfit_since = engine, request.epoch + 1, None
            request.claimed = request.claimed or self.now
            self.holdings.setdefault(engine, []).append(request.id)
        if claim.taken:
            self._leave_lines()
            if self.drain.at == 0:  # a busy period begins
                self.drain.note(self.now, 0)
            self.bell = self.bell or bool(self.waiting())
        self.bell = self.bell or claim.left
        if len(self.leases) > 1:
            lease.standing = claim.standing()
        return claim.taken

    def _others(self, engine: str) -> list[Standing]:
        others = (lease for name, lease in self.leases.items() if name != engine and lease.expires >= self.now)
        return [lease.standing for lease in others if lease.standing]

    def _finish(self, engine: str, request_id: str, epoch: int, generated: int, details: str) -> int:
        """Returns what it had weighed in the queue. Only who holds it, under this epoch, can finish it."""
        request = self.requests.get(request_id)
        if request is None or (request.engine, request.epoch) != (engine, epoch):
            return 0
        if request.account and details:
            cached, reason, prefill, decode = details.split()
            times = int(cached), engine, int(prefill), int(decode)
            self.ledger.append(ledger.entry(request, self.now, generated, reason, times))
        self._forget(request)
        if self.leases[engine].trial == request_id:
            self.leases[engine].trial = ""
        self.turns.correct(request, generated)
        self.turns.forget_past(line_of(request))
        return request.tokens

    # --- ends and returns -------------------------------------------------------------------------------------------

    def release(self, engine: str, deaths: bool, max_deaths: int, error: str) -> list[object]:
        """Everything that the engine holds goes back: it died, or hands back."""
        return self._released(*self._let_go(engine, deaths, max_deaths, error))

    def _released(self, requeued: int, buried: int, endings: list[list[object]]) -> list[object]:
        self.bell = self.bell or requeued > 0
        if endings:
            self._settle()
        return [requeued, buried, endings]

    def _let_go(self, engine: str, died: bool, max_deaths: int, error: str) -> tuple[int, int, list[list[object]]]:
        lease = self.leases.pop(engine, None)
        buried, endings, held = 0, [], self.held(engine)
        for request in held:
            assert lease is not None, "held without a lease"
            poison = died and self._count_death(request, engine, lease) and len(request.lives) >= max_deaths
            if not request.cancelled and not poison:
                self._put_back(request)
                continue
            self.turns.correct(request, request.seq)
            if poison and not request.cancelled:
                self.dead.append((request.id, len(request.lives), " ".join(request.engines), error))
                buried += 1
            endings.append(self._end(request, "cancelled" if request.cancelled else "dead"))
        self.holdings.pop(engine, None)
        return len(held) - len(endings), buried, endings

    def _count_death(self, request: Request, engine: str, lease: Lease) -> bool:
        """It counts against the suspect on trial where there is one, else against all; once per life of an engine,
        and never against what was done."""
        if request.done or lease.trial not in ("", request.id) or lease.life in request.lives:
            return False
        request.suspect = True
        request.engines.append(engine)
        request.lives.append(lease.life)
        return True

    def _put_back(self, request: Request) -> None:
        request.engine, request.cost, request.since = "", request.needs(), self.now
        if request.queued:
            self.turns.rejoin(request)

    def _expire(self) -> list[list[object]]:
        late = [r for r in self.waiting() if r.deadline is not None and r.deadline <= self.now]
        return [self._end_waiting(r, "expired") for r in sorted(late, key=lambda r: (r.deadline, r.id))]

    def _end_waiting(self, request: Request, reason: str) -> list[object]:
        if request.suspect:  # charged when it was claimed, and still
            self.turns.correct(request, request.seq)
        return self._end(request, reason)

    def _end(self, request: Request, reason: str) -> list[object]:
        self._forget(request)
        self._leave_lines()
        if request.account:
            self.ledger.append(ledger.entry(request, self.now, request.seq, reason))
        self.endings[request.id] = ending(request, reason)
        return self.endings[request.id]

    def _forget(self, request: Request) -> None:
        del self.requests[request.id]
        if request.engine:
            self.holdings[request.engine].remove(request.id)

    def _leave_lines(self) -> None:
        """A tenant with nothing in a line has no turn there."""
        lines = {line_of(r) for r in self.requests.values() if r.queued}
        self.turns.start = {line: start for line, start in self.turns.start.items() if line in lines}

    def _settle(self) -> None:
        """Nothing waits: nobody need wake. Nothing runs either: whatever was owed is forgotten."""
        if self.waiting():
            return
        self.bell = False
        if not any(self.holdings.values()):
            self.turns, self.arrivals, self.drain.at = Turns(), 0, 0

    # --- looks ------------------------------------------------------------------------------------------------------

    def depths(self) -> list[int]:
        return [sum(r.service_class == c for r in self.waiting()) for c in CLASSES]

    def position(self, request_id: str) -> int | None:
        """How many are ahead. Raises LookupError where that is an estimate: beside other tenants, classes, suspects."""
        request = self.requests.get(request_id)
        if request is None or not request.waits:
            return None
        others = [r for r in self.waiting() if r is not request]
        if request.suspect or any(r.suspect or line_of(r) != line_of(request) for r in others):
            raise LookupError
        return sum(r.place < request.place for r in others)


def _bytes(requests: Sequence[Request]) -> int:
    return sum(len(r.body) for r in requests)


def _handed_over(r: Request) -> list[object]:
    return [[r.id, r.gateway, r.epoch, r.seq, r.prompt, int(r.logged)], r.body, b"".join(r.frames)]
