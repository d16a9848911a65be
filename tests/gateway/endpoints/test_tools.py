"""Tools in chat completions over HTTP, the store and a scripted engine, whose words are given in advance."""

from __future__ import annotations

import json

import pytest

from tests.gateway.conftest import ScriptedEngine

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ROME, OSLO = '{"city": "Röm 🎉"}', '{"city": "Oslo"}'
CALL = '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>'
TWO = f"Let me see.\n\n{CALL.format(ROME)}\n{CALL.format(OSLO)}"


@pytest.fixture(scope="module")
def shared_engine(store_url):
    """With room for the words in which this model, whose every byte is a token, is told of its tools."""
    engine = ScriptedEngine(store_url, card={"max_model_len": 4096})
    engine.start()
    assert engine.registered.wait(10)
    yield engine
    engine.stop()


def ask(client, **fields):
    response = client.post("/v1/chat/completions", json={**HELLO, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def stream(client, headers=None, **fields):
    response = client.post("/v1/chat/completions", json={**HELLO, **fields, "stream": True}, headers=headers or {})
    *chunks, done = [line.split("data: ", 1)[1] for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def together(chunks):
    """A stream's choice as if it had not been streamed, every delta's shape checked on the way."""
    text, calls, thought, finish, tokens = None, [], "", None, []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        text = text if delta.get("content") is None else (text or "") + delta["content"]
        thought += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls) and part["type"] == "function" and part["function"]["name"]
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        tokens += (choice["logprobs"] or {"content": []})["content"]
        finish = finish or choice["finish_reason"]
    return text, calls, thought, finish, tokens


def grammar(engine):
    found = engine.seen[-1].request.sampling.grammar
    return None if found is None else (found.kind, json.loads(found.text)["format"], found.param)


def prompt(engine):
    return engine.tokenizer.decode(engine.seen[-1].request.prompt)


def test_a_call_that_the_model_begins_by_itself(client, engine):
    engine.answer = TWO
    choice = ask(client, tools=[WEATHER])
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": ROME}, {"name": "weather", "arguments": OSLO}
    ]  # fmt: skip
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert '"description": "Weather of a city."' in prompt(engine)
    assert grammar(engine) is None


def test_content_is_null_beside_calls_alone_and_a_string_without(client, engine):
    engine.answer = CALL.format(ROME)
    assert ask(client, tools=[WEATHER])["message"]["content"] is None
    engine.answer = "No <tool_call> at all"
    choice = ask(client, tools=[WEATHER])
    assert (choice["message"]["content"], choice["finish_reason"]) == (engine.answer, "stop")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1}, {"stop": ["Os"]}, {"max_tokens": 60}])
def test_the_stream_equals_the_whole(client, engine, more):
    engine.answer = TWO
    whole = ask(client, tools=[WEATHER], **more)
    chunks = stream(client, tools=[WEATHER], **more)
    text, calls, _, finish, tokens = together(chunks)
    message = whole["message"]
    assert (text, finish) == (message["content"], whole["finish_reason"])
    assert [call["function"] for call in calls] == [call["function"] for call in message["tool_calls"]]
    assert tokens == (whole["logprobs"] or {"content": []})["content"]
    first = chunks[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": None, "refusal": None}


def test_ids_of_calls_are_the_same_whenever_an_answer_is_read(client, engine):
    engine.answer = TWO
    headers = {"idempotency-key": "tools-1", "x-noria-resumable": "true"}
    first, again = (together(stream(client, headers, tools=[WEATHER])) for _ in range(2))
    assert first == again and len(engine.seen) == 1


def test_required_is_held_by_a_grammar(client, engine):
    engine.answer = f'{{"name": "weather", "arguments": {ROME}}}'
    choice = ask(client, tools=[WEATHER, NOW], tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ROME}
    assert choice["message"]["content"] is None
    kind, form, param = grammar(engine)
    assert (kind, param) == ("structural_tag", "tools")
    assert '{"name": "weather", "arguments": ' in json.dumps(form).replace('\\"', '"')
    assert {"weather", "now"} <= set(json.dumps(form).replace('\\"', '"').split('"'))
    assert together(stream(client, tools=[WEATHER, NOW], tool_choice="required"))[3] == "tool_calls"


def test_a_named_function_is_the_only_one_and_ends_with_stop(client, engine):
    engine.answer = f'{{"name": "weather", "arguments": {ROME}}}'
    choice = ask(client, tools=[WEATHER, NOW], tool_choice=NAMED)
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 1)
    assert '"now"' not in json.dumps(grammar(engine)[1]).replace('\\"', '"')
    assert together(stream(client, tools=[WEATHER, NOW], tool_choice=NAMED))[3] == "stop"


def test_allowed_tools_narrow_what_may_be_called_and_not_what_is_shown(client, engine):
    engine.answer = '{"name": "now", "arguments": {}}'
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = ask(client, tools=[WEATHER, NOW], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert "weather" in prompt(engine) and "weather" not in json.dumps(grammar(engine)[1])


def test_none_shows_no_tools_and_reads_no_calls(client, engine):
    engine.answer = CALL.format(ROME)
    choice = ask(client, tools=[WEATHER], tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (engine.answer, "stop")
    assert "weather" not in prompt(engine) and grammar(engine) is None


def test_one_call_where_parallel_calls_are_refused(client, engine):
    engine.answer = TWO
    assert len(ask(client, tools=[WEATHER], parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    assert len(together(stream(client, tools=[WEATHER], parallel_tool_calls=False))[1]) == 1


def test_calls_of_strict_functions_are_held_even_if_the_model_begins_them(client, engine):
    engine.answer = CALL.format(ROME)
    ask(client, tools=[STRICT, NOW])
    _, form, _ = grammar(engine)
    assert (form["type"], form["triggers"], form["stop_after_first"]) == ("triggered_tags", ["<tool_call>"], False)
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [
        WEATHER["function"]["parameters"], {"type": "object"}
    ]  # fmt: skip
    ask(client, tools=[STRICT], parallel_tool_calls=False)
    assert grammar(engine)[1]["stop_after_first"] is True


def test_the_older_functions(client, engine):
    engine.answer = CALL.format(ROME)
    function = WEATHER["function"]
    choice = ask(client, functions=[function])
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": ROME}
    deltas = [c["delta"] for chunk in stream(client, functions=[function]) for c in chunk["choices"]]
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [part["name"] for part in parts if "name" in part] == ["weather"]
    assert "".join(part["arguments"] for part in parts) == ROME
    engine.answer = f'{{"name": "weather", "arguments": {ROME}}}'
    assert ask(client, functions=[function], function_call={"name": "weather"})["finish_reason"] == "stop"
    assert grammar(engine)[2] == "functions"
    history = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": ROME}},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    ask(client, messages=history, max_tokens=1)
    assert '<tool_call>\n{"name": "weather"' in prompt(engine) and "<tool_response>\nsunny" in prompt(engine)


def test_a_round_trip_keeps_the_call_in_the_history(client, engine):
    engine.answer = CALL.format(ROME)
    message = ask(client, tools=[WEATHER])["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "18 C"}
    ask(client, tools=[WEATHER], messages=[*HELLO["messages"], message, result], max_tokens=1)
    assert CALL.format(ROME) in prompt(engine) and "18 C" in prompt(engine)


def wrong(**function):
    return {"type": "function", "function": {"name": "f", **function}}


BAD = [
    ({"tools": [{}]}, "tools[0].type"), ({"tools": 5}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [wrong(name="a b")]}, "tools[0].function.name"),
    ({"tools": [wrong(name="n" * 65)]}, "tools[0].function.name"), ({"tools": [wrong(x=1)]}, "tools[0].function.x"),
    ({"tools": [wrong(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [wrong(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"), ({"tools": [NOW] * 129}, "tools"),
    ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [NOW], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
    ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
     "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tool_choice": NAMED}, "tool_choice"), ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}], "tools": [NOW]}, "functions"), ({"function_call": {"name": "f"}}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:50])
def test_what_is_refused_is_named(client, engine, fields, param):
    response = client.post("/v1/chat/completions", json={**HELLO, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert not engine.seen


def test_deep_parameters_are_refused_and_not_rendered(client, engine):
    deep = {"type": "object"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    response = client.post("/v1/chat/completions", json={**HELLO, "tools": [wrong(parameters=deep)]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].function.parameters")


def test_thoughts_are_told_apart_and_counted(launch, store_url):
    engine = launch.engine(store_url, id="thinker", aliases=(), reasoning_parser="think", tool_parser="json")
    gateway = launch.gateway(store_url)
    assert engine.registered.wait(10)
    engine.answer = '<think>\nRöm?\n</think>\n\n{"name": "now", "arguments": {}}'
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/v1/models/thinker").status_code == 200)
        fields = {**HELLO, "model": "thinker"}
        body = client.post("/v1/chat/completions", json={**fields, "tools": [NOW]}).json()
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Röm?", None)
        assert message["tool_calls"][0]["function"]["name"] == "now"
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len("<think>\nRöm?\n")
        text, calls, thought, finish, _ = together(stream(client, tools=[NOW], model="thinker"))
        assert (text, thought, finish, len(calls)) == (None, "Röm?", "tool_calls", 1)
        client.post("/v1/chat/completions", json={**fields, "tools": [NOW], "tool_choice": "required"})
        assert grammar(engine)[1]["elements"][0]["type"] == "optional", "thoughts may come before a forced call"
        engine.answer = "<think>\nRöm?\n</think>\n\nSo."
        message = client.post("/v1/chat/completions", json=fields).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Röm?", "So.")


def test_a_model_whose_calls_are_not_read_refuses_tools(launch, store_url):
    engine = launch.engine(store_url, id="mute", aliases=(), tool_parser="none")
    assert engine.registered.wait(10)
    with launch.gateway(store_url).client() as client:
        launch.eventually(lambda: client.get("/v1/models/mute").status_code == 200)
        response = client.post("/v1/chat/completions", json={**HELLO, "model": "mute", "tools": [NOW]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
