"""Large forms are read beside the event loop, which goes on meanwhile; what they are read as is the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from noria.gateway.errors import InvalidRequest
from noria.gateway.grammars.json_schema import enforceable
from noria.gateway.parsing import parsed
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.strict import parse

_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def _wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": ["string", "integer", "null"]} for i in range(count)}}


def _referring(depth: int) -> dict[str, Any]:
    """A few hundred bytes that stand for 2 ** depth schemas."""
    twice = {
        f"d{i}": {"allOf": [{"properties": {"a": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]}}}]} for i in range(depth)
    }
    for number, schema in enumerate(twice.values()):
        schema["allOf"][0]["properties"]["b"] = {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}]}
    return {"$defs": {**twice, f"d{depth}": {"type": "integer"}}, "allOf": [{"$ref": "#/$defs/d0"}]}


@pytest.mark.parametrize("schema", [_wide(1400), _referring(9)])
async def test_streams_go_on_while_a_large_form_is_read(schema: dict[str, Any]) -> None:
    body = {**_CHAT, "guided_json": schema}
    reading = asyncio.create_task(parsed(ChatRequest, body))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 3  # two where the loop itself has read it
    assert (await reading).grammar == parse(ChatRequest, body).grammar


async def test_a_large_form_is_refused_as_a_small_one_is() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await parsed(ChatRequest, {**_CHAT, "guided_json": {**_wide(500), "not": {}}})
    assert refusal.value.param == "guided_json"


def test_names_that_nobody_asks_about_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an undeclared property may be called is a long expression, needed only where there may be some."""
    monkeypatch.setattr("noria.gateway.grammars.containers.other_than", lambda names: pytest.fail("not needed"))
    assert len(enforceable(_wide(50))["properties"]) == 50
