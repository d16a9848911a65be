"""Functions over /v1/responses: calls as items, their outputs, choices, streamed, whole and in the background."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import ScriptedEngine
from tests.gateway.endpoints.test_responses import ask, events_of, prompt_of, refusal, stream, text_of


@pytest.fixture(scope="module")
def shared_engine(store_url: str) -> Iterator[ScriptedEngine]:
    """With room for the tools in a prompt in which every byte is a token."""
    engine = ScriptedEngine(store_url, card={"max_model_len": 4096})
    engine.start()
    assert engine.registered.wait(10)
    yield engine
    engine.stop()


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    "strict": None,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'


def test_calls_are_items_of_their_own(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.answer = "Let me see.\n" + CALL
    made = ask(client, input="Weather?", tools=[WEATHER])
    said_first, call = made["output"]
    assert said_first["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert json.loads(call["arguments"]) == {"location": "Paris"}
    assert made["tools"] == [{**WEATHER, "description": None, "strict": False}] and made["status"] == "completed"
    events = stream(client, input="Weather?", tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [k for k in kinds if k.startswith("output_item")] == ["output_item.added", "output_item.done"] * 2
    arguments = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    done = next(e for e in events if e["type"] == "response.function_call_arguments.done")
    assert arguments == done["arguments"] == call["arguments"] and done["name"] == "get_weather"
    unlike = ("id", "call_id")
    streamed = [{k: v for k, v in item.items() if k not in unlike} for item in events[-1]["response"]["output"]]
    assert streamed == [{k: v for k, v in item.items() if k not in unlike} for item in made["output"]]


def test_a_calls_output_goes_back_to_the_model(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.answer = CALL
    first = ask(client, input="Weather?", tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "18 C"}
    engine.answer = "It is 18 C."
    made = ask(client, input=[output], previous_response_id=first["id"], tools=[WEATHER])
    assert text_of(made) == "It is 18 C."
    prompt = prompt_of(engine)
    places = [prompt.index(text) for text in ("Weather?", '"Paris"', "18 C")]
    assert places == sorted(places)


def test_a_background_call_is_the_same_whenever_it_is_read(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.answer = "So.\n" + CALL
    events = stream(client, tools=[WEATHER], background=True)
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    with client.stream("GET", f"/v1/responses/{response['id']}?stream=true") as again:
        assert events_of(again) == events


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "nope"}}, "tool_choice.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_choices_of_tools_are_checked(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refusal(client, **{"tools": [WEATHER], **fields})["param"] == param


def test_forced_and_allowed_calls_are_held_by_a_grammar(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.answer = '{"name": "get_weather", "arguments": {"location": "Rome"}}'
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    for choice in ("required", {"type": "function", "name": "get_weather"}, allowed):
        made = ask(client, tools=[WEATHER], tool_choice=choice)
        assert [item["type"] for item in made["output"]] == ["function_call"] and made["tool_choice"] == choice
        assert engine.seen[-1].request.sampling.grammar is not None
    assert ask(client, tools=[WEATHER], tool_choice="none")["output"][0]["type"] == "message"
