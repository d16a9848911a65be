"""The engine's face of the broker: lease, one exchange per iteration, hand-back. Synchronous, one engine process.

Knows who owns which request and under which epoch; knows nothing of batches, tokens' meaning or HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from noria.engine.wire import keys
from noria.engine.wire.connection import (
    CLAIM,
    LEASE,
    MAX_BLOCK,
    REGISTER,
    RELEASE,
    BrokerUnavailable,
    Store,
    StoreFault,
)
from noria.engine.wire.messages import (
    Claimed,
    EngineStats,
    FinishReason,
    ModelCard,
    TokenFrame,
    TokenizerFiles,
    decode_request,
    encode,
)
from noria.engine.wire.publish import (
    POISON,
    Row,
    address,
    final_publications,
    last_frame,
    parse_progress,
    publication,
    published,
    to_row,
)
from noria.engine.wire.recorder import Recorder
from noria.engine.wire.slots import Command
from noria.engine.wire.timesheet import Ended, Timesheet, without_times

MAX_DEATHS = 2
"""A request in whose company this many engines died is poison."""

DEAD_LENGTH = 1000
"""Entries of the dead-letter stream (roughly)."""

LOOKAHEAD = 16
"""Requests of a class that may be looked at past one that does not fit."""

MAX_PASSED = 2.0
"""Seconds for which others may pass a head that does not fit; after that nobody does."""

MAX_PASSED_OVER = 32
"""Others of its class that may pass the one that has waited longest. So a request that finds k waiting in its class is
claimed within (k + 1) * (MAX_PASSED_OVER + 1) claims of that class, whatever comes later, of any tenant or priority."""

MAX_LEFT = 0.1
"""Seconds for which a request may be left to an engine that holds less. An idle one comes within milliseconds, a busy
one after its iteration; one that is stopped, or slower than this, costs a request no more."""

GONE_AFTER = 2.0
"""Seconds without its stream after which a gateway is taken for gone. A stream that expired while the store was away
is back within a second, so frames wait this long instead of being dropped."""


@dataclass(slots=True)
class Exchange:
    """What one exchange brought. Requests in `fenced` are no longer ours: drop them without another frame. Take the
    fields in this order: a fenced request may come back in `claimed`, a claimed one may already be cancelled. End the
    requests of gone gateways with a last frame as ever."""

    fenced: list[str] = field(default_factory=list)
    claimed: list[Claimed] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    gone_gateways: list[str] = field(default_factory=list)
    lease_lost: bool = False


class EngineBroker:
    """One engine's connection to its pool. `renew` may be called from another thread; all else from one thread."""

    def __init__(
        self,
        redis_url: str,
        model_id: str,
        *,
        engine_id: str | None = None,
        lease_seconds: float = 5.0,
        max_passed: float = MAX_PASSED,
        max_left: float = MAX_LEFT,
        gone_after: float = GONE_AFTER,
    ) -> None:
        self.engine_id = engine_id or secrets.token_hex(8)
        self._model_id = model_id
        self._pool = keys.pool(model_id)
        self._lease = lease_seconds
        self._max_passed = max_passed
        self._max_left = max_left
        self._gone_after = gone_after
        self._store = Store(redis_url)
        self._heartbeat_store = Store(redis_url)
        self._bell_store = Store(redis_url, block=MAX_BLOCK)
        self._published: tuple[ModelCard, TokenizerFiles] | None = None
        self._life = secrets.token_hex(4)  # a death counts against a request once per life
        self._lives = 0
        self._renewed_at = 0.0  # monotonic, taken before the renewal was sent: never later than the server's view
        self._registered_at = 0.0
        self._fenced = True
        self._reply_lost = False
        self._held: dict[str, bool] = {}  # request id -> whether it is logged
        self._recorder = Recorder(self._pool, self.engine_id)
        self._unsent: dict[str, list[Row]] = {}  # by gateway: frames handed in, not known to be stored
        self._outbox: dict[str, list[Row]] = {}  # by key: frames for streams alone, which go out first
        self._ended: list[Ended] = []  # to finish without a new frame
        self._timesheet = Timesheet()
        self._silent_since: dict[str, float] = {}  # by key: when a gateway's stream was first missing

    def ping(self) -> None:
        """Raise BrokerUnavailable unless the store answers."""
        self._store.run(("PING",))

    def announce(self, tokenizer: TokenizerFiles) -> None:
        """Publish the tokenizer of a pool that is to come, so that gateways make their tables while the model loads."""
        ttl = _ms(keys.CARD_TTL)
        with suppress(BrokerUnavailable):  # of use, not of need: `register` publishes it too
            self._store.run(
                ("SET", keys.tokenizer(self._model_id), encode(tokenizer), "PX", ttl),
                REGISTER(keys.POOLS, self._model_id, ttl),
            )

    def register(self, card: ModelCard, tokenizer: TokenizerFiles) -> None:
        """Publish the card and the tokenizer, enter the pool in the register, take the lease.

        Whatever an earlier process held under this engine id is put back first. Raises BrokerUnavailable.
        """
        self._published = (card, tokenizer)
        sent_at = time.monotonic()
        ttl = _ms(keys.CARD_TTL)
        replies = self._store.run(
            ("SET", keys.card(self._model_id), encode(card), "PX", ttl),
            ("SET", keys.tokenizer(self._model_id), encode(tokenizer), "PX", ttl),
            self._release(deaths=0 if self._lives else 1),
            self._lease_command(take=True),
            REGISTER(keys.POOLS, self._model_id, ttl),
        )
        self._held.clear()
        self._recorder.clear()
        self._timesheet.clear()
        self._unsent.clear()
        self._ended.clear()
        self._lives += 1
        self._fenced = self._reply_lost = False
        self._renewed_at = self._registered_at = sent_at
        self._post_endings(replies[2])

    def exchange(
        self,
        frames: dict[str, list[TokenFrame]],
        stats: EngineStats | None,
        *,
        max_requests: int | Sequence[int],
        max_blocks: int | Sequence[int],
    ) -> Exchange:
        """One iteration's round trip: record progress, publish, finish, claim. `frames` is keyed by gateway.

        Frames handed in are kept until they are known to be stored: after BrokerUnavailable call again with the new
        ones only. A frame with `finish` set ends its request. The frames of a resumed request are published again
        here. `max_requests` and `max_blocks` are one number for all classes or one for each, by rank; a request taken
        uses up the room of every class. With `lease_lost` the lease has been taken anew, but everything held until now
        belongs to others. Raises BrokerUnavailable.
        """
        for gateway, new in frames.items():
            rows = [to_row(frame) for frame in new]
            self._timesheet.note(new)
            self._unsent.setdefault(gateway, []).extend(rows)
            self._recorder.note(rows)
        lapsed = time.monotonic() - self._renewed_at > self._lease
        if self._fenced or (lapsed and not self._renew(self._store)):
            # Others may speak for our requests by now: nothing of theirs is published.
            return self._start_again()
        sent_at = time.monotonic()
        rows = [row for new in self._unsent.values() for row in new]
        outgoing = self._outgoing()
        replies = self._run_exchange(rows, outgoing, self._claim(rows, stats, max_requests, max_blocks))
        if not replies[-1][0]:
            self._fenced = True
            return self._start_again()
        self._renewed_at = sent_at
        self._recorder.stored()
        outcome = Exchange()
        self._note_published(outgoing, replies[:-1], outcome)
        self._note_ended(rows, replies[-1][4], outcome)
        self._note_claimed(replies[-1], outcome)
        return outcome

    def renew(self) -> bool:
        """Renew the lease from a heartbeat thread, over its own connection. False: it was taken away, which the next
        `exchange` reports. Raises BrokerUnavailable."""
        return not self._fenced and self._renew(self._heartbeat_store)

    def wait(self, timeout: float) -> None:
        """Sleep for at most `timeout` (and one second), or until the bell rings. Never raises: with the store away it
        sleeps the time out, and the next exchange says what is wrong."""
        until = time.monotonic() + min(timeout, MAX_BLOCK)
        try:
            self._bell_store.run(("BLPOP", keys.bell(self._model_id), max(0.001, min(timeout, MAX_BLOCK))))
        except BrokerUnavailable:
            time.sleep(max(0.0, until - time.monotonic()))

    def close(self, *, died: bool = False) -> None:
        """Hand back: frames still unsent go out, everything held returns to its old place with its progress, the
        lease ends. Not a death, unless a part of the engine `died` over what it held. With the store away the lease
        simply lapses."""
        with suppress(BrokerUnavailable, StoreFault):
            if not self._fenced and (self._unsent or self._outbox or self._ended or self._reply_lost):
                with suppress(StoreFault):  # told before; what is held goes back all the same
                    self.exchange({}, None, max_requests=0, max_blocks=0)
            if not self._fenced:
                self._post_endings(self._store.run(self._release(deaths=int(died)))[0])
        self._fenced = True
        self._held.clear()
        for store in (self._store, self._heartbeat_store, self._bell_store):
            store.close()

    def _renew(self, store: Store) -> bool:
        life, sent_at = self._lives, time.monotonic()
        (alive,) = store.run(self._lease_command(take=False))
        if life == self._lives:  # else the answer is about a lease before this one
            if alive:
                self._renewed_at = max(self._renewed_at, sent_at)
            else:
                self._fenced = True
        return bool(alive)

    def _start_again(self) -> Exchange:
        if self._published is None:
            raise RuntimeError("register() comes before exchange()")
        fenced = list(self._held)
        self.register(*self._published)  # should this raise, we are still fenced and the next call comes here again
        return Exchange(fenced=fenced, lease_lost=True)

    def _outgoing(self) -> dict[str, list[Row]]:
        """All frames to publish, by the key of their stream."""
        outgoing = {key: list(rows) for key, rows in self._outbox.items()}
        for gateway, rows in self._unsent.items():
            outgoing.setdefault(keys.frames(gateway), []).extend(rows)
            for row in rows:
                if self._held.get(row.frame.request_id):
                    outgoing.setdefault(keys.log(row.frame.request_id), []).append(row)
        return outgoing

    def _run_exchange(self, rows: list[Row], outgoing: dict[str, list[Row]], claim: Command) -> list[Any]:
        """Replies: one per stream, claim. Progress goes first, so that no token reaches a client that the next engine
        would not know of; FINISH goes last, so that no death in between loses a last frame."""
        progress = self._recorder.command(rows)
        commands = [] if progress is None else [progress]
        commands += [publication(key, payload) for key, payload in outgoing.items()]
        commands.append(claim)
        now = time.monotonic()
        register = now - self._registered_at > keys.REGISTER_EVERY
        if register:
            commands += [REGISTER(keys.POOLS, self._model_id, _ms(keys.CARD_TTL)), self._lease_command(take=False)]
        try:
            replies = self._store.run(*commands)
        except BrokerUnavailable:
            self._reply_lost = True
            raise
        self._reply_lost = False
        if register:
            self._registered_at = now
            del replies[-2:]
        return replies if progress is None else replies[1:]

    def _claim(
        self,
        rows: list[Row],
        stats: EngineStats | None,
        max_requests: int | Sequence[int],
        max_blocks: int | Sequence[int],
    ) -> Command:
        finished = self._ended + [self._timesheet.ended(row.frame) for row in rows if row.frame.finish]
        return CLAIM(
            self._pool,
            self.engine_id,
            _ms(self._lease),
            _by_rank(max_requests),
            _by_rank(max_blocks),
            b"" if stats is None else encode(stats),
            int(self._reply_lost),
            LOOKAHEAD,
            _ms(self._max_passed),
            MAX_PASSED_OVER,
            _ms(self._max_left),
            len(finished),
            *(value for ended in finished for value in ended),
            *(self._held if self._reply_lost else ()),
        )

    def _note_ended(self, rows: list[Row], fenced: Sequence[bytes], outcome: Exchange) -> None:
        for row in rows:
            if row.frame.finish:
                self._drop(row.frame.request_id)
        for request_id, _, _, _ in self._ended:
            self._drop(request_id)
        self._ended.clear()
        # A request that ended in an exchange whose reply was lost is fenced too, but for the engine it has ended.
        outcome.fenced = [request_id for request_id in map(bytes.decode, fenced) if self._drop(request_id)]

    def _drop(self, request_id: str) -> bool:
        self._recorder.close(request_id)
        self._timesheet.close(request_id)
        return self._held.pop(request_id, None) is not None

    def _note_published(self, outgoing: dict[str, list[Row]], replies: Sequence[Any], outcome: Exchange) -> None:
        now = time.monotonic()
        self._unsent.clear()
        self._outbox.clear()
        for (key, rows), reply in zip(outgoing.items(), replies, strict=True):
            if reply is not None:
                self._silent_since.pop(key, None)
            elif keys.is_log(key):
                continue  # the store lost it, and who reads it learns that there
            elif now - self._silent_since.setdefault(key, now) < self._gone_after:
                self._outbox[key] = rows
            else:
                del self._silent_since[key]
                outcome.gone_gateways.append(keys.gateway_of(key))

    def _note_claimed(self, reply: Sequence[Any], outcome: Exchange) -> None:
        _, claimed, cancelled, expired, _ = reply
        rows_by_key = final_publications(expired)
        for ending, body, progress in claimed:
            request_id, gateway, epoch, seq, _, logged = ending
            self._held[request_id.decode()] = bool(logged)
            self._recorder.open(request_id.decode(), epoch, seq)
            try:
                request = decode_request(body)
                delivered = [msgspec.structs.replace(frame, epoch=epoch) for frame in parse_progress(progress)]
            except msgspec.DecodeError as error:  # written by another version: its own fault, nobody else's
                request = None
                delivered = [last_frame(ending, FinishReason.ERROR, f"unreadable request: {error}")]
            if delivered:
                rows = [to_row(frame) for frame in delivered]
                address(
                    rows_by_key, rows, request_id=request_id.decode(), gateway=gateway.decode(), logged=bool(logged)
                )
            if request is None or (delivered and delivered[-1].finish):
                # In the second case its engine died between the last frame and FINISH: that alone is left to do.
                account = "" if request is None else request.account
                self._ended.append(without_times(delivered[-1], epoch, seq, is_accounted=bool(account)))
            else:
                outcome.claimed.append(Claimed(request, epoch, delivered))
                if request.account:
                    self._timesheet.open(request.id)
        outcome.cancelled = list(dict.fromkeys(i.decode() for i in cancelled))
        self._post(rows_by_key, expired)

    def _post_endings(self, reply: Sequence[Any]) -> None:
        _, _, endings = reply
        self._post(final_publications(endings), endings)

    def _post(self, rows_by_key: dict[str, list[Row]], endings: Sequence[Any]) -> None:
        """Publish right away what belongs to no iteration; what does not get through goes with the next exchange."""
        for key, rows in rows_by_key.items():
            self._outbox.setdefault(key, []).extend(rows)
        if rows_by_key:
            commands = [publication(key, self._outbox[key]) for key in rows_by_key]
            with suppress(BrokerUnavailable):
                replies = self._store.run(*commands, *published(self._pool, endings))
                for key, sent in zip(rows_by_key, replies, strict=False):
                    if sent is not None or keys.is_log(key):
                        del self._outbox[key]

    def _lease_command(self, *, take: bool) -> Command:
        return LEASE(self._pool, self.engine_id, _ms(self._lease), int(take), _ms(keys.CARD_TTL), self._life)

    def _release(self, *, deaths: int) -> Command:
        return RELEASE(self._pool, self.engine_id, deaths, MAX_DEATHS, DEAD_LENGTH, POISON)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _by_rank(numbers: int | Sequence[int]) -> str:
    return str(numbers) if isinstance(numbers, int) else " ".join(map(str, numbers))
