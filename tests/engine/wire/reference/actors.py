"""Who uses the pool in these tests: engines that emit what they are told to, clients that take it in, lost connections.

Knows the brokers' faces; nothing of what the scripts should do.
"""

from __future__ import annotations

from typing import Any

from noria.engine.wire.broker import BrokerUnavailable, EngineBroker, Exchange
from noria.engine.wire.connection import Command
from noria.engine.wire.messages import Claimed, FinishReason, TokenFrame, Usage
from tests.engine.wire.reference.mirror import Mirror

LEASE = 5.0
"""Seconds."""


class Client:
    """One request's answer as a gateway takes it: older epochs and seen positions are dropped."""

    def __init__(self) -> None:
        self.epoch = 0
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None

    def accept(self, frame: TokenFrame) -> None:
        if self.finish is not None or frame.epoch < self.epoch:
            return
        self.epoch = frame.epoch
        assert frame.seq <= len(self.tokens), "a gap"
        self.tokens += frame.token_ids[len(self.tokens) - frame.seq :]
        assert self.tokens == list(range(len(self.tokens))), "a token that does not belong there"
        self.finish = frame.finish


class SyncStore:
    """What an engine's broker takes for its connection. When told to, it carries out the first commands alone and then
    loses the connection."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self.cut: int | None = None

    def run(self, *commands: Command) -> list[Any]:
        if self.cut is None:
            return self._mirror.run(*commands)
        cut, self.cut = self.cut, None
        self._mirror.run(*commands[:cut])
        raise BrokerUnavailable("cut")

    def close(self) -> None:
        """The connection is shared."""


class AsyncStore:
    """The same for a gateway's broker."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    async def run(self, *commands: Command) -> list[Any]:
        return self._mirror.run(*commands)

    async def close(self) -> None:
        """The connection is shared."""


class Engine:
    """Position p of every answer is token p. `held` is what it runs: the claim, and how many tokens it has."""

    def __init__(self, mirror: Mirror, model_id: str, engine_id: str) -> None:
        self.broker = EngineBroker(
            "unix:///nowhere", model_id, engine_id=engine_id, gone_after=0.0, lease_seconds=LEASE
        )
        self.store = SyncStore(mirror)
        self.broker._store = self.broker._heartbeat_store = self.store  # type: ignore[assignment]
        self.id = engine_id
        self.held: dict[str, tuple[Claimed, int]] = {}

    def frame(self, request_id: str, count: int, finish: FinishReason | None = None) -> TokenFrame:
        """The next `count` tokens, the last ones where max_tokens are reached."""
        claimed, seq = self.held[request_id]
        after = min(seq + count, claimed.request.sampling.max_tokens)
        if after == claimed.request.sampling.max_tokens:
            finish = finish or FinishReason.LENGTH
        if finish:
            del self.held[request_id]
        else:
            self.held[request_id] = claimed, after
        usage = Usage(len(claimed.request.prompt), after) if finish else None
        return TokenFrame(request_id, claimed.epoch, seq, list(range(seq, after)), finish=finish, usage=usage)

    def exchange(
        self, frames: list[tuple[str, TokenFrame]], slots: Any = 0, blocks: Any = 10**6, cut: int | None = None
    ) -> None:
        """One iteration's round trip, and another where something has to be ended. `frames` are (gateway, frame)."""
        by_gateway: dict[str, list[TokenFrame]] = {}
        for gateway, frame in frames:
            by_gateway.setdefault(gateway, []).append(frame)
        self.store.cut = cut
        try:
            outcome = self.broker.exchange(by_gateway, None, max_requests=slots, max_blocks=blocks)
        except BrokerUnavailable:
            return
        finally:
            self.store.cut = None
        ends = self._take_in(outcome)
        if ends:
            self.exchange([(gateway, self.frame(i, 0, FinishReason.CANCELLED)) for i, gateway in ends.items()])

    def _take_in(self, outcome: Exchange) -> dict[str, str]:
        """Returns what is to be ended, with its gateway."""
        for request_id in outcome.fenced:
            self.held.pop(request_id, None)
        for claimed in outcome.claimed:
            assert claimed.request.id not in self.held, "handed over twice"
            self.held[claimed.request.id] = claimed, sum(len(frame.token_ids) for frame in claimed.delivered)
        assert not outcome.lease_lost or not self.held, "the lease was lost, but not the batch"
        gateways = {i: claimed.request.gateway for i, (claimed, _) in self.held.items()}
        logged = {i for i, (claimed, _) in self.held.items() if claimed.request.logged}
        ends = {i: gateways[i] for i in outcome.cancelled if i in gateways}
        return ends | {i: g for i, g in gateways.items() if g in outcome.gone_gateways and i not in logged}
