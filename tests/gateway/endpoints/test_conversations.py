"""/v1/conversations over a real store and HTTP: what is kept, listed and built on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway.conftest import KEY, Launch, ScriptedEngine
from tests.gateway.endpoints.test_responses import TEXT, ask, prompt_of, stream


def create(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/conversations", json=fields)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def said(client: httpx.Client, conversation_id: str, query: str = "?order=asc") -> tuple[list[str], bool]:
    page = client.get(f"/v1/conversations/{conversation_id}/items{query}").json()
    return [item["content"][0]["text"] for item in page["data"]], page["has_more"]


def test_a_conversation_is_made_changed_and_deleted(client: httpx.Client) -> None:
    made = create(client, metadata={"a": "1"}, items=[message("hi")])
    assert made["object"] == "conversation" and made["id"].startswith("conv_") and made["metadata"] == {"a": "1"}
    path = f"/v1/conversations/{made['id']}"
    assert client.get(path).json() == made
    changed = client.post(path, json={"metadata": {"b": "2"}}).json()
    assert changed == {**made, "metadata": {"b": "2"}} == client.get(path).json()
    assert client.delete(path).json() == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    for method, where in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/msg_1")):
        assert client.request(method, path + where).status_code == 404
    assert client.post(path, json={"metadata": {}}).status_code == 404
    assert client.post(path + "/items", json={"items": [message("x")]}).status_code == 404


def test_items_are_listed_in_their_order_and_paged(client: httpx.Client) -> None:
    made = create(client, items=[message(str(n)) for n in range(20)])
    path = f"/v1/conversations/{made['id']}/items"
    added = client.post(path, json={"items": [message("20"), message("21", "assistant")]}).json()
    assert [item["role"] for item in added["data"]] == ["user", "assistant"]
    assert added["data"][1]["content"] == [{"type": "output_text", "text": "21", "annotations": [], "logprobs": []}]
    assert said(client, made["id"], "?order=asc&limit=30") == ([str(n) for n in range(22)], False)
    assert said(client, made["id"], "?limit=2") == (["21", "20"], True)
    cursor = added["first_id"]
    assert said(client, made["id"], f"?limit=2&after={cursor}") == (["19", "18"], True)
    assert client.get(f"{path}?after=nope").json()["error"]["param"] == "after"
    assert client.get(f"{path}/{cursor}").json() == added["data"][0]
    assert client.delete(f"{path}/{cursor}").json() == made
    assert client.get(f"{path}/{cursor}").status_code == 404


def test_answers_build_on_a_conversation_and_join_it(client: httpx.Client, engine: ScriptedEngine) -> None:
    made = create(client, items=[message("My word is papaya.")])
    first = ask(client, input="Remember?", conversation=made["id"])
    assert first["conversation"] == {"id": made["id"]}
    assert said(client, made["id"])[0] == ["My word is papaya.", "Remember?", TEXT]
    stream(client, input="And now?", conversation={"id": made["id"]}, store=False)
    prompt = prompt_of(engine)
    places = [prompt.index(text) for text in ("papaya", "Remember?", TEXT, "And now?")]
    assert places == sorted(places)
    assert said(client, made["id"])[0][3:] == ["And now?", TEXT]
    counted = client.post("/v1/responses/input_tokens", json={"model": "tiny", "conversation": made["id"]}).json()
    assert counted["input_tokens"] > len(prompt) / 2


def test_a_repeated_request_joins_once(client: httpx.Client, engine: ScriptedEngine) -> None:
    made = create(client)
    body = {"model": "tiny", "input": "hi", "conversation": made["id"]}
    for _ in range(2):
        assert client.post("/v1/responses", json=body, headers={"Idempotency-Key": made["id"]}).status_code == 200
    assert said(client, made["id"])[0] == ["hi", TEXT]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": [message("x")] * 21}, "items"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ({"items": [{"type": "message", "role": "narrator", "content": "x"}]}, "items[0].role"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"title": "x"}, "title"),
    ],
)
def test_bad_conversations_are_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = client.post("/v1/conversations", json=fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_what_a_tenant_keeps_is_its_own_and_bounded(launch: Launch, own_port: int) -> None:
    launch.store(own_port)
    url = f"redis://127.0.0.1:{own_port}/0"
    gateway = launch.gateway(url, api_key=f"a={KEY},b=sk-b", max_conversation_bytes=4096)
    with gateway.client() as mine, gateway.client("sk-b") as theirs:
        launch.eventually(lambda: mine.get("/v1/conversations/x").status_code == 404)
        made = create(mine)
        path = f"/v1/conversations/{made['id']}"
        assert theirs.get(path).status_code == 404
        assert theirs.post(path + "/items", json={"items": [message("x")]}).status_code == 404
        full = mine.post(path + "/items", json={"items": [message("x" * 5000)]})
        assert full.status_code == 400 and full.json()["error"]["code"] == "storage_limit_exceeded"
        assert theirs.post("/v1/conversations", json={"items": [message("x" * 3000)]}).status_code == 200
