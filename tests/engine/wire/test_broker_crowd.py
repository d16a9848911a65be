"""Three engines and one gateway at once: every request runs exactly once, whoever stops in between."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import pytest

from noria.engine.wire.broker import EngineBroker
from noria.engine.wire.messages import Claimed, EngineStats, FinishReason, TokenFrame, Usage

NUM_REQUESTS = 150
LENGTH = 5
LOOKED = {"noria:{demo/model}:last_look"}
"""There where a gateway has looked for lapsed leases, a second after its start."""


class CountingEngine(threading.Thread):
    """Answers every request with 0, 1, 2, … up to its max_tokens, one token per turn, until told to stop."""

    def __init__(self, broker: EngineBroker, stop: threading.Event) -> None:
        super().__init__()
        self.broker, self.stop = broker, stop
        self.started: list[str] = []
        self.num_finished = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.turns()
        except BaseException as error:
            self.error = error

    def turns(self) -> None:
        running: dict[str, tuple[Claimed, int]] = {}
        frames: dict[str, list[TokenFrame]] = {}
        while not self.stop.is_set():
            outcome = self.broker.exchange(frames, EngineStats(), max_requests=8 - len(running), max_blocks=1000)
            frames = {}
            for request_id in outcome.fenced:
                running.pop(request_id, None)
            for claimed in outcome.claimed:
                self.started.append(claimed.request.id)
                running[claimed.request.id] = claimed, sum(len(f.token_ids) for f in claimed.delivered)
            for request_id, (claimed, seq) in list(running.items()):
                finish = FinishReason.LENGTH if seq + 1 == claimed.request.sampling.max_tokens else None
                usage = Usage(len(claimed.request.prompt), seq + 1) if finish else None
                frame = TokenFrame(request_id, claimed.epoch, seq, [seq], finish=finish, usage=usage)
                frames.setdefault(claimed.request.gateway, []).append(frame)
                running[request_id] = claimed, seq + 1
                if finish:
                    del running[request_id]
                    self.num_finished += 1
            if not running and not frames:
                self.broker.wait(0.5)
        self.broker.close()


@pytest.mark.parametrize("stops", [0, 2], ids=["steady", "two engines drain"])
async def test_each_request_runs_exactly_once(server, gateway, make_engine, make_request, reader, card, stops):
    make_engine().close()
    resting = server.key_names() | LOOKED
    flags = [threading.Event() for _ in range(3)]
    engines = [CountingEngine(make_engine(), flag) for flag in flags]
    for engine in engines:
        engine.start()
    try:
        ids = [f"r{i}" for i in range(NUM_REQUESTS)]
        for i, request_id in enumerate(ids):
            await gateway.enqueue(make_request(request_id, max_tokens=LENGTH, tenant=f"t{i % 7}"), card)
            if random.random() < 0.2:
                await asyncio.sleep(0.002)
            if i in (50, 100)[:stops]:
                flags[i // 100].set()
        await reader.last_of(*ids)
        async with asyncio.timeout(5):  # the last FINISH may be a moment behind the last frame
            while any("request:" in key for key in server.key_names()):
                await asyncio.sleep(0.01)
    finally:
        for flag in flags:
            flag.set()
        for engine in engines:
            await asyncio.to_thread(engine.join)
    assert [engine.error for engine in engines] == [None, None, None]
    if not stops:
        started = Counter(request_id for engine in engines for request_id in engine.started)
        assert started == Counter(ids)
        assert all(engine.num_finished for engine in engines), "one engine did nothing"
    lasts = Counter((f.request_id, f.epoch) for f in reader.all if f.finish)
    assert Counter(request_id for request_id, _ in lasts) == Counter(ids)
    for request_id in ids:  # as a gateway reads it: drop older epochs and seen positions
        tokens: list[int] = []
        for frame in (f for f in reader.all if f.request_id == request_id):
            tokens += frame.token_ids[max(0, len(tokens) - frame.seq) :]
        assert tokens == list(range(LENGTH))
    assert server.key_names() | LOOKED == resting
