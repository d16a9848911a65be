"""/v1/messages over HTTP: Anthropic's dialect, spoken by its own client and by hand."""

from __future__ import annotations

import json

import anthropic
import msgspec
import pytest

from tests.gateway.conftest import ScriptedEngine

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared_engine(store_url):
    """With room for the words in which this model, whose every byte is a token, is told of its tools."""
    engine = ScriptedEngine(store_url, card={"max_model_len": 4096})
    engine.start()
    assert engine.registered.wait(10)
    yield engine
    engine.stop()


@pytest.fixture
def sdk(gateway):
    with anthropic.Anthropic(base_url=gateway.url, api_key="sk-test-key", max_retries=0) as made:
        yield made


def create(sdk, **fields):
    return sdk.messages.create(**{"model": "tiny", "max_tokens": 64, "messages": HELLO, **fields})


def post(client, **fields):
    return client.post("/v1/messages", json={"model": "tiny", "max_tokens": 64, "messages": HELLO, **fields})


def refused(client, **fields):
    response = post(client, **fields)
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert response.headers["request-id"] == body["request_id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]


def prompt(engine):
    return engine.tokenizer.decode(engine.seen[-1].request.prompt)


def test_a_message_has_the_documented_shape(sdk, engine):
    message = create(sdk)
    assert message.id.startswith("msg_") and message._request_id
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        "tiny",
        "end_turn",
    )
    (block,) = message.content
    assert (block.type, block.text) == ("text", engine.answer)
    usage = message.usage
    assert usage.input_tokens == len(engine.seen[-1].request.prompt)
    assert usage.output_tokens == len(engine.tokenizer.encode(engine.answer)) + 1
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)
    assert create(sdk, max_tokens=2).stop_reason == "max_tokens"


def test_a_stream_is_the_same_message_event_by_event(sdk, client):
    whole = create(sdk)
    streamed = made(sdk, True)
    assert streamed.model_dump(exclude={"id", "content"}) == whole.model_dump(exclude={"id", "content"})
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    kinds = []
    for event in post(client, stream=True).text.strip().split("\n\n"):
        named, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == named.removeprefix("event: ")
        kinds.append(named.removeprefix("event: "))
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip


def made(sdk, stream, **fields):
    """The message, as the client puts it together from a stream or as it came."""
    if not stream:
        return create(sdk, **fields)
    with sdk.messages.stream(**{"model": "tiny", "max_tokens": 64, "messages": HELLO, **fields}) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_was_found_is_told(sdk, engine, stream):
    message = made(sdk, stream, stop_sequences=["zzz", "wörld"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "wörld")
    assert message.content[0].text == engine.answer[: engine.answer.index("wörld")]


def text(words, **fields):
    return {"type": "text", "text": words, **fields}


def test_system_turns_and_blocks_reach_the_template(sdk, engine):
    source = {"type": "text", "media_type": "text/plain", "data": "E"}
    turns = [
        {"role": "user", "content": [text("A"), text("B")]},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": [text("D")]},
        {"role": "user", "content": [{"type": "document", "title": "T", "source": source}]},
    ]
    create(sdk, messages=turns, system=[text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")])
    assert prompt(engine) == "system\nBe brief.\nBe kind.\nuser\nA\nB\nC\nassistant\nD\nuser\nT\nE\nassistant\n"


def test_the_beginning_of_an_answer_is_gone_on_with(sdk, engine):
    create(sdk, messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert prompt(engine).endswith("assistant\nThe answer is (")


def test_sampling_fields_reach_the_engine(client, engine):
    assert post(client, temperature=0.5, top_p=0.9, top_k=7, metadata={"user_id": "u"}, max_tokens=3).status_code == 200
    sampling = engine.seen[-1].request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 3)


def test_tokens_are_counted_as_they_will_be(sdk, engine):
    fields = {"model": "tiny", "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    counted = sdk.messages.count_tokens(**fields).input_tokens
    assert sdk.messages.create(max_tokens=1, **fields).usage.input_tokens == counted > 20


WEATHER = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'


@pytest.mark.parametrize("stream", [False, True])
def test_uses_of_tools_come_as_blocks_and_their_results_go_back(sdk, engine, stream):
    engine.answer = f'Let me see.\n{CALL}is"}}}}\n</tool_call>'
    fields = {"max_tokens": 200, "tools": [WEATHER]}
    message = made(sdk, stream, **fields)
    said, call = message.content
    assert (said.text, message.stop_reason) == ("Let me see.", "tool_use")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
    assert call.id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": True, "content": [text("18 C")]}
    answered = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result, text("So?")]}]
    create(sdk, **{**fields, "messages": [*HELLO, *answered], "max_tokens": 1})
    seen = prompt(engine)
    assert '"city": "Paris"' in seen and "Error: 18 C" in seen and seen.endswith("So?\nassistant\n")


def test_a_call_that_is_cut_off_shows_as_much_as_there_is(sdk, engine):
    engine.answer = CALL
    message = create(sdk, tools=[WEATHER], max_tokens=len(engine.tokenizer.encode(CALL)))
    assert (message.stop_reason, message.content[0].input) == ("max_tokens", {"city": "Par"})


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
    ],
)
def test_the_choice_of_tools_is_held_as_in_chats(client, engine, choice, grammar):
    engine.answer = '{"name": "weather", "parameters": {"city": "Paris"}}'
    answer = post(client, tools=[WEATHER], tool_choice=choice)
    assert (engine.seen[-1].request.sampling.grammar is not None) == grammar
    assert answer.status_code == 200
    if grammar:
        assert answer.json()["stop_reason"] == "tool_use"


def test_thoughts_are_blocks_and_can_be_left_out(launch, store_url, files):
    switch = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{# </think> #}"
    thinking = msgspec.structs.replace(files, chat_template=(files.chat_template or "") + switch)
    engine = launch.engine(store_url, thinking, id="thinker", max_model_len=4096)
    engine.answer = "Hmm.</think>Yes."
    gateway = launch.gateway(store_url)
    launch.eventually(lambda: "thinker" in gateway.client().get("/v1/models").text)
    sdk = anthropic.Anthropic(base_url=gateway.url, api_key="sk-test-key", max_retries=0)
    fields = {"model": "thinker", "messages": HELLO, "max_tokens": 2000}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for display, shown in ((None, "Hmm."), ("omitted", "")):
        with sdk.messages.stream(**fields, thinking={**thinking, "display": display}) as stream:
            thought, text = stream.get_final_message().content
        assert (thought.type, thought.thinking, text.text) == ("thinking", shown, "Yes.")
    assert engine.tokenizer.decode(engine.seen[-1].request.prompt).endswith("<think>")
    sdk.messages.create(**fields)
    assert not engine.tokenizer.decode(engine.seen[-1].request.prompt).endswith("<think>")


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
DEEP = {"type": "tool_use", "id": "t", "name": "f", "input": json.loads('{"a":' * 400 + "1" + "}" * 400)}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": ["x"] * 5}, "'stop_sequences'"),
        ({"container": "c"}, "container"),
        ({"stop": "x"}, "stop_sequences"),
        ({"colour": 1}, "colour"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget_tokens"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [DEEP]}]}, "messages[0].content[0].input"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].content[0].type"),
    ],
)
def test_a_fault_is_named_as_this_api_calls_it(client, fields, says):
    status, kind, message = refused(client, **fields)
    assert (status, kind) == (400, "invalid_request_error")
    assert says in message, message


def test_errors_have_anthropics_shape_wherever_they_come_from(gateway, client, engine):
    assert refused(client, model="none")[:2] == (404, "not_found_error")
    client.headers["authorization"] = "Bearer wrong"
    assert refused(client)[:2] == (401, "authentication_error")
    del client.headers["authorization"]
    client.headers["x-api-key"] = "sk-test-key"
    assert post(client).status_code == 200
    assert client.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/messages/x").json()["error"]["type"] == "not_found_error"
    engine.fail_with = "it broke"
    assert refused(client)[:2] == (500, "api_error")
    last = post(client, stream=True).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n") and json.loads(last.split("data: ")[1])["error"]["type"] == "api_error"
    assert client.post("/v1/completions", json={}).json()["error"]["param"], "others speak OpenAI's"
