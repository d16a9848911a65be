"""A real store, a small engine on it and its client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from bench.store import running_store
from noria.engine.wire.broker import GatewayBroker
from tests.engine.small_engine import Client, RunningEngine


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with running_store() as running:
        yield running.url


@pytest.fixture
async def client(store: str):  # type: ignore[no-untyped-def]
    redis.Redis.from_url(store).flushall()
    broker = GatewayBroker(store)
    await broker.start()
    yield Client(broker)
    await broker.close()


@pytest.fixture
def engine(client: Client, store: str) -> Iterator[RunningEngine]:
    running = RunningEngine(store)
    yield running
    running.stop()
