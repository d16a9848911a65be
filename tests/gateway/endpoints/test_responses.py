"""/v1/responses over a real store and HTTP, with a scripted engine: shapes, events, what is kept, what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from noria.gateway.responses.items import MAX_FILE_BYTES
from tests.gateway.conftest import KEY, ScriptedEngine

TEXT = "Hello, wörld 🎉! One two three four five."


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is its type."""
    found, name = [], None
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append(json.loads(line.removeprefix("data: ")))
            assert found[-1]["type"] == name
    return found


def stream(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "input": "hi", "stream": True, **fields}
    with client.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response)


def refusal(client: httpx.Client, status: int = 400, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})
    assert response.status_code == status, response.text
    return response.json()["error"]  # type: ignore[no-any-return]


def prompt_of(engine: ScriptedEngine) -> str:
    """The text of the last prompt that reached the engine."""
    return engine.tokenizer.decode(engine.seen[-1].request.prompt)


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text_of(response: dict[str, Any]) -> str:
    return "".join(p["text"] for item in response["output"] if item["type"] == "message" for p in item["content"])


@pytest.fixture(autouse=True)
def _script(engine: ScriptedEngine) -> None:
    """All tests here talk to the module's engine."""


def test_a_response_has_the_documented_shape(client: httpx.Client, engine: ScriptedEngine) -> None:
    made = ask(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=100, user="u")
    assert made["object"] == "response" and made["status"] == "completed" and made["id"].startswith("resp_")
    (item,) = made["output"]
    assert item["role"] == "assistant" and item["status"] == "completed" and item["id"].startswith("msg_")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert made["usage"]["output_tokens"] > 10
    assert made["usage"]["total_tokens"] == made["usage"]["input_tokens"] + made["usage"]["output_tokens"]
    echoed = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "max_output_tokens": 100}
    echoed |= {"user": "u", "store": True, "background": False, "tools": [], "tool_choice": "auto", "top_p": 1.0}
    assert {name: made[name] for name in echoed} == echoed
    assert made["incomplete_details"] is None and made["error"] is None and made["completed_at"] >= made["created_at"]
    assert "system\nBe brief." in prompt_of(engine) and "user\nhi" in prompt_of(engine)


def test_the_stream_says_everything_in_order(client: httpx.Client) -> None:
    events = stream(client)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == TEXT
    last = events[-1]["response"]
    assert text_of(last) == TEXT and last["output"][0] == events[-2]["item"]
    assert client.get(f"/v1/responses/{last['id']}").json() == last


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 16},
        {"stop": "One"},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 3, "stop": ["three"]},
        {"include": ["message.output_text.logprobs"], "max_output_tokens": 17},
    ],
)
def test_streamed_equals_unstreamed(client: httpx.Client, fields: dict[str, Any]) -> None:
    whole, events = ask(client, **fields), stream(client, **fields)
    last = events[-1]["response"]
    unlike = ("id", "created_at", "completed_at")
    assert {k: v for k, v in last.items() if k not in (*unlike, "output")} == {
        k: v for k, v in whole.items() if k not in (*unlike, "output")
    }
    parts = [[item["content"] for item in answer["output"]] for answer in (last, whole)]
    assert parts[0] == parts[1]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == text_of(whole)
    assert [entry for event in deltas for entry in event["logprobs"]] == whole["output"][0]["content"][0]["logprobs"]


def test_out_of_tokens_is_incomplete(client: httpx.Client) -> None:
    made = ask(client, max_output_tokens=16)
    assert made["status"] == "incomplete" and made["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made["completed_at"] is None and made["output"][0]["status"] == "incomplete"
    assert made["usage"]["output_tokens"] == 16
    assert stream(client, max_output_tokens=16)[-1]["type"] == "response.incomplete"


def test_items_of_every_kind_reach_the_model(client: httpx.Client, engine: ScriptedEngine) -> None:
    given = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [part("input_text", text="What is "), part("input_text", text="it?")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "message", "role": "user", "content": [{"type": "input_file", "filename": "a.txt",
            "file_data": "data:text/plain;base64," + base64.b64encode(b"Title: fixture").decode()}]},
    ]  # fmt: skip
    made = ask(client, input=given)
    prompt = prompt_of(engine)
    order = ["system\nRules.", "user\nWhat is it?", "assistant\nLet me see.", "a.txt:\nTitle: fixture"]
    places = [prompt.index(text) for text in order]
    assert places == sorted(places)
    listed = client.get(f"/v1/responses/{made['id']}/input_items?order=asc").json()
    assert [item["type"] for item in listed["data"]] == [item.get("type", "message") for item in given]
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "Rules."}]
    assert listed["first_id"] == listed["data"][0]["id"] and not listed["has_more"]


def test_input_items_are_paged(client: httpx.Client) -> None:
    made = ask(client, input=[{"role": "user", "content": str(n)} for n in range(5)])
    path = f"/v1/responses/{made['id']}/input_items"

    def listed(query: str) -> tuple[list[str], bool]:
        page = client.get(path + query).json()
        return [item["content"][0]["text"] for item in page["data"]], page["has_more"]

    assert listed("?limit=2") == (["4", "3"], True)
    assert listed("?limit=2&order=asc") == (["0", "1"], True)
    ids = [item["id"] for item in client.get(path + "?order=asc").json()["data"]]
    assert listed(f"?order=asc&after={ids[2]}") == (["3", "4"], False)
    assert listed(f"?order=asc&before={ids[2]}&after={ids[0]}") == (["1"], False)
    assert client.get(path + "?limit=101").json()["error"]["param"] == "limit"
    assert client.get(path + "?order=up").json()["error"]["param"] == "order"


def test_a_response_goes_on_with_another(client: httpx.Client, engine: ScriptedEngine) -> None:
    first = ask(client, input="My word is papaya.", instructions="Only once.")
    second = ask(client, input="And?", previous_response_id=first["id"])
    third = ask(client, input="More?", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    prompt = prompt_of(engine)
    assert "Only once." not in prompt, "instructions are not carried over"
    places = [prompt.index(text) for text in ("papaya", "And?", "More?")]
    assert places == sorted(places) and prompt.count(f"assistant\n{TEXT}") == 2
    own = client.get(f"/v1/responses/{third['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in own] == ["More?"]
    client.delete(f"/v1/responses/{first['id']}")
    error = refusal(client, previous_response_id=third["id"])
    assert error["code"] == "previous_response_not_found" and error["param"] == "previous_response_id"


def test_items_are_referred_to_by_id(client: httpx.Client, engine: ScriptedEngine) -> None:
    first = ask(client, input="A long story.")
    item = client.get(f"/v1/responses/{first['id']}/input_items").json()["data"][0]
    references = [{"type": "item_reference", "id": item["id"]}, {"id": first["output"][0]["id"]}]
    ask(client, input=[*references, {"role": "user", "content": "Again."}])
    assert f"user\nA long story.\nassistant\n{TEXT}" in prompt_of(engine)
    error = refusal(client, input=[{"type": "item_reference", "id": "msg_nope"}])
    assert error["param"] == "input[0].id"


def test_what_is_not_stored_is_not_found(client: httpx.Client) -> None:
    made = ask(client, store=False)
    assert made["store"] is False
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404
    kept = ask(client)
    assert client.delete(f"/v1/responses/{kept['id']}").json() == {
        "id": kept["id"], "object": "response", "deleted": True
    }  # fmt: skip
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        gone = client.request(method, f"/v1/responses/{kept['id']}{path}")
        assert gone.status_code == 404 and kept["id"] in gone.json()["error"]["message"]
    assert client.get("/v1/responses/a%2Fb%20c").status_code == 404


def test_a_kept_response_is_streamed_again(client: httpx.Client) -> None:
    made = ask(client)
    with client.stream("GET", f"/v1/responses/{made['id']}?stream=true&starting_after=1") as response:
        events = events_of(response)
    assert events[0]["sequence_number"] == 2 and events[-1]["response"] == made
    assert "".join(event["delta"] for event in events if "delta" in event) == TEXT


def test_uploaded_text_is_read(client: httpx.Client, engine: ScriptedEngine) -> None:
    def upload(content: bytes) -> str:
        sent = client.post("/v1/files", files={"file": ("a.txt", content)}, data={"purpose": "user_data"})
        return str(sent.json()["id"])

    note = upload("Title: größe".encode())
    made = ask(client, input=[said(part("input_file", file_id=note), part("input_text", text="Title?"))])
    assert f"{note}:\nTitle: größe" in prompt_of(engine)
    ask(client, previous_response_id=made["id"])
    assert "Title: größe" in prompt_of(engine)
    for wrong in (upload(b"\xff\xfe"), upload(b"x" * (MAX_FILE_BYTES + 1))):
        assert refusal(client, input=[said(part("input_file", file_id=wrong))])["param"] == "input"
    client.delete(f"/v1/files/{note}")
    assert refusal(client, 404, previous_response_id=made["id"])["param"] == "input"


def test_truncation_drops_the_oldest_items(client: httpx.Client, engine: ScriptedEngine) -> None:
    given = [{"role": "user", "content": f"<{n}>" + "x" * 60} for n in range(10)]
    error = refusal(client, input=given)
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    made = ask(client, input=given, truncation="auto", instructions="Stay.")
    assert made["truncation"] == "auto"
    prompt = prompt_of(engine)
    assert "Stay." in prompt and "<9>" in prompt and "<0>" not in prompt
    assert len(engine.seen[-1].request.prompt) > 300, "no more was dropped than had to be"


def test_prewarming_gives_no_output(client: httpx.Client, engine: ScriptedEngine) -> None:
    made = ask(client, prompt_cache_options={"prewarm": True})
    assert made["output"] == [] and made["status"] == "completed" and made["usage"]["output_tokens"] == 0
    assert engine.seen[-1].request.sampling.max_tokens == 1


def test_moderation_is_answered_with_an_error_and_never_skipped(client: httpx.Client) -> None:
    policy = {"input": {"mode": "score"}, "output": {"mode": "score"}}
    made = ask(client, moderation={"model": "m", "policy": policy})
    assert made["moderation"]["input"]["type"] == made["moderation"]["output"]["type"] == "error"
    blocking = {"model": "m", "policy": {"input": {"mode": "block"}}}
    assert refusal(client, moderation=blocking)["param"] == "moderation.policy.input.mode"


def test_deltas_are_padded_on_request(client: httpx.Client) -> None:
    events = stream(client, stream_options={"include_obfuscation": True})
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert all(event["obfuscation"] for event in deltas)
    assert "obfuscation" not in next(e for e in stream(client) if e["type"] == "response.output_text.delta")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": [said(part("input_image", image_url="x"))]}, "input[0].content[0].type"),
        ({"input": [said(part("input_file", file_url="x"))]}, "input[0].content[0].file_url"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"max_output_tokens": 15}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"context_management": []}, "context_management"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"previous_response_id": "resp_nope"}, "previous_response_id"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"image": {"context_compression": "enabled"}}, "image.context_compression"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"background_options": {}}, "background_options"),
        ({"access_programs": {}}, "access_programs"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refusal(client, **fields)["param"] == param


def test_retrieval_checks_its_query(client: httpx.Client) -> None:
    made = ask(client)
    path = f"/v1/responses/{made['id']}"
    assert client.get(path + "?include[]=message.output_text.logprobs&include=file_search_call.results").json() == made
    for query, param in (
        ("include=all", "include"),
        ("stream=maybe", "stream"),
        ("starting_after=x", "starting_after"),
    ):
        assert client.get(f"{path}?{query}").json()["error"]["param"] == param


def test_unknown_names_are_not_found(client: httpx.Client) -> None:
    assert refusal(client, 404, model="nope")["code"] == "model_not_found"
    assert "conv_nope" in refusal(client, 404, conversation="conv_nope")["message"]


def test_tenants_do_not_see_each_others_responses(launch: Any, own_port: int) -> None:
    launch.store(own_port)
    url = f"redis://127.0.0.1:{own_port}/0"
    launch.engine(url)
    gateway = launch.gateway(url, api_key=f"a={KEY},b=sk-b")
    with gateway.client() as mine, gateway.client("sk-b") as theirs:
        launch.eventually(lambda: mine.get("/readyz").status_code == 200)
        made = ask(mine)
        assert mine.get(f"/v1/responses/{made['id']}").status_code == 200
        assert theirs.get(f"/v1/responses/{made['id']}").status_code == 404
        assert refusal(theirs, previous_response_id=made["id"])["code"] == "previous_response_not_found"


def test_input_tokens_are_counted(client: httpx.Client, engine: ScriptedEngine) -> None:
    counted = client.post("/v1/responses/input_tokens", json={"model": "tiny", "input": "hi", "instructions": "Short."})
    made = ask(client, instructions="Short.")
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}


def test_a_compaction_stands_for_what_it_was_made_of(client: httpx.Client, engine: ScriptedEngine) -> None:
    talk = [{"role": "user", "content": "Launch on Tuesday."}, {"role": "assistant", "content": "Noted."}]
    made = client.post("/v1/responses/compact", json={"model": "tiny", "input": talk})
    assert made.status_code == 200, made.text
    short = made.json()
    assert short["object"] == "response.compaction" and short["usage"]["output_tokens"] > 0
    assert [item["type"] for item in short["output"]] == ["message", "compaction"]
    assert "Summarise" in prompt_of(engine)
    ask(client, input=[*short["output"], {"role": "user", "content": "When?"}])
    prompt = prompt_of(engine)
    assert "Launch on Tuesday." in prompt and TEXT in prompt and "Noted." not in prompt
    forged = {"type": "compaction", "encrypted_content": "noria-1.AAAA"}
    assert refusal(client, input=[forged])["param"] == "input"
    assert client.post("/v1/responses/compact", json={"input": talk}).json()["error"]["param"] == "model"


def test_a_failure_ends_the_stream_with_its_reason(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.fail_with = "it broke"
    events = stream(client)
    assert [event["type"] for event in events][-2:] == ["error", "response.failed"]
    assert events[-2]["message"] == "it broke"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert refusal(client, 500)["message"] == "it broke"


def test_a_repeat_with_the_same_key_gets_the_same_response(client: httpx.Client, engine: ScriptedEngine) -> None:
    headers = {"Idempotency-Key": "responses-1"}
    body = {"model": "tiny", "input": "hi"}
    first = client.post("/v1/responses", json=body, headers=headers).json()
    again = client.post("/v1/responses", json=body, headers=headers).json()
    assert again["id"] == first["id"] and again["output"] == first["output"] and len(engine.seen) == 1
    resumable = client.post("/v1/responses", json={**body, "stream": True}, headers={"X-Noria-Resumable": "true"})
    assert resumable.status_code == 400 and resumable.json()["error"]["param"] == "X-Noria-Resumable"
