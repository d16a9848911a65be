"""A model's tables are made once, however impatient those are who ask for them, and while it still loads."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.messages import TokenizerFiles
from noria.gateway import model_directory
from noria.gateway.model_directory import ModelDirectory


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TokenizerFiles]:
    """The files of which tables were made, each of which takes half a second."""
    made: list[TokenizerFiles] = []
    make = model_directory._made_tables

    def slow(files: TokenizerFiles) -> Any:
        made.append(files)
        time.sleep(0.5)
        return make(files)

    monkeypatch.setattr(model_directory, "_made_tables", slow)
    return made


async def test_who_gives_up_waiting_does_not_begin_it_anew(
    store_url: str, engine: Any, made: list[TokenizerFiles]
) -> None:
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
        assert [status.card.id for status in directory.live()] == ["tiny"] and len(made) == 1
    finally:
        await broker.close()


async def test_tables_are_made_while_the_model_loads(store_url: str, engine: Any, made: list[TokenizerFiles]) -> None:
    assert await asyncio.to_thread(engine.registered.wait, 20)
    loading = EngineBroker(store_url, "coming")
    loading.announce(engine.files)
    broker = GatewayBroker(store_url)
    directory = ModelDirectory(broker)
    try:
        await directory.refresh()
        while len(made) < 2:
            await directory.refresh()
            await asyncio.sleep(0.05)
        assert "coming" not in [status.card.id for status in directory.models_now()]
        loading.register(msgspec.structs.replace(engine.card, id="coming", aliases=()), engine.files)
        while "coming" not in [status.card.id for status in directory.live()]:
            await directory.refresh()
            await asyncio.sleep(0.05)
        assert len(made) == 2
        others = msgspec.structs.replace(engine.files, bos_token=None)
        loading.register(msgspec.structs.replace(engine.card, id="coming", aliases=("c",), created=1), others)
        while len(made) < 3:
            await directory.refresh()
            await asyncio.sleep(0.05)
    finally:
        loading.close()
        await broker.close()
