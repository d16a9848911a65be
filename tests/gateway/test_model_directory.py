"""A model's tables are made once, however impatient those are who ask for them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from noria.engine.wire.broker import GatewayBroker
from noria.gateway import model_directory
from noria.gateway.model_directory import ModelDirectory


async def test_who_gives_up_waiting_does_not_begin_it_anew(
    store_url: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    build = model_directory._build

    def slow(card: Any, files: Any) -> Any:
        made.append(card.id)
        time.sleep(0.5)
        return build(card, files)

    monkeypatch.setattr(model_directory, "_build", slow)
    assert await asyncio.to_thread(engine.registered.wait, 20)
    broker = GatewayBroker(store_url)
    directory = ModelDirectory(broker)
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await directory.refresh()
            assert directory.live() == []
        await directory.refresh()
        assert [status.card.id for status in directory.live()] == made == ["tiny"]
    finally:
        await broker.close()
