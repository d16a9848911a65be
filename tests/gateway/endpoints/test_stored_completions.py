"""Chat completions with `store`: kept, found, filtered, changed, deleted; streamed ones as those that are not."""

from __future__ import annotations

import pytest

CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "store": True}


@pytest.fixture
def own(launch, store_url, engine):
    """A client of a tenant that has stored nothing yet, and one of another."""
    gateway = launch.gateway(store_url, api_key="one=sk-one,two=sk-two")
    with gateway.client("sk-one") as one, gateway.client("sk-two") as two:
        launch.eventually(lambda: one.get("/readyz").status_code == 200)
        yield one, two
        for client in (one, two):
            for completion in client.get(CHAT).json()["data"]:
                assert client.delete(f"{CHAT}/{completion['id']}").status_code == 200


def streamed(client, body):
    """The completion's id, and its text, once the stream has ended."""
    answer = client.post(CHAT, json={**body, "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    return answer.text.split('"id":"', 1)[1].split('"', 1)[0]


def test_a_kept_completion_is_what_was_answered(own):
    one, two = own
    asked = {**HI, "temperature": 0.5, "user": "u", "metadata": {"k": "v"}, "n": 2, "logprobs": True}
    answer = one.post(CHAT, json=asked).json()
    kept = one.get(f"{CHAT}/{answer['id']}").json()
    assert {name: kept[name] for name in answer} == answer
    told = (kept["metadata"], kept["temperature"], kept["input_user"], kept["tools"], kept["seed"])
    assert told == ({"k": "v"}, 0.5, "u", None, None)
    assert two.get(f"{CHAT}/{answer['id']}").status_code == 404
    other = one.post(CHAT, json={**HI, "store": False}).json()["id"]
    refused = one.get(f"{CHAT}/{other}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "completion_id")


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_kept_as_the_whole_that_it_is(own, engine, n):
    one, _ = own
    asked = {**HI, "n": n, "logprobs": True, "top_logprobs": 1, "seed": 5}
    kept = one.get(f"{CHAT}/{streamed(one, asked)}").json()
    whole = one.post(CHAT, json=asked).json()
    assert kept["object"] == "chat.completion"
    assert (kept["choices"], kept["usage"]) == (whole["choices"], whole["usage"])


def test_a_resumable_stream_and_a_repeat_are_kept_once(own):
    one, _ = own
    for headers in ({"x-noria-resumable": "true"}, {"idempotency-key": "k"}, {"idempotency-key": "k"}):
        assert one.post(CHAT, json={**HI, "stream": True}, headers=headers).status_code == 200
    assert len(one.get(CHAT).json()["data"]) == 2


def test_lists_are_filtered_pages(own):
    one, two = own
    ids = [one.post(CHAT, json={**HI, "metadata": {"n": str(n % 2), "all": "x y"}}).json()["id"] for n in range(4)]

    def listed(**query):
        answer = one.get(CHAT, params=query).json()
        assert answer["object"] == "list"
        return [ids.index(completion["id"]) for completion in answer["data"]], answer["has_more"]

    assert listed() == ([0, 1, 2, 3], False)
    assert listed(order="desc", limit=3) == ([3, 2, 1], True)
    assert listed(after=ids[1], limit=1) == ([2], True)
    assert listed(**{"metadata[n]": "1"}) == ([1, 3], False)
    assert listed(**{"metadata[n]": "1", "metadata[all]": "x y", "limit": 1}) == ([1], True)
    assert listed(**{"metadata[none]": "1"}) == ([], False)
    assert listed(model="tiny") == ([0, 1, 2, 3], False) and listed(model="other") == ([], False)
    assert two.get(CHAT).json()["data"] == []
    for query in ({"limit": "-1"}, {"order": "up"}, {"after": "chatcmpl-no"}, {"color": "red"}):
        refused = one.get(CHAT, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(query)))


def test_messages_metadata_and_deletion(own, engine):
    one, _ = own
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "y"},
    ]
    completion_id = one.post(CHAT, json={**HI, "messages": messages}).json()["id"]
    path = f"{CHAT}/{completion_id}"
    assert one.get(path).json()["input_messages"] == messages
    first, second = one.get(path + "/messages").json()["data"]
    assert (first["id"], first["role"], first["content"]) == (f"{completion_id}-1", "assistant", "ab")
    assert (first["content_parts"], second["content_parts"]) == (parts, None)
    assert (second["id"], second["content"]) == (f"{completion_id}-3", engine.answer)
    assert one.get(path + "/messages", params={"order": "desc", "limit": 1}).json()["data"] == [second]
    assert one.get(path + "/messages", params={"after": first["id"]}).json()["data"] == [second]
    assert one.post(path, json={"metadata": {"new": "1"}}).json()["metadata"] == {"new": "1"}
    assert one.get(path).json()["metadata"] == {"new": "1"}
    for body in ({}, {"metadata": {"k": 1}}, {"metadata": {}, "color": 1}):
        assert one.post(path, json=body).status_code == 400
    assert one.post(path, json={"metadata": None}).json()["metadata"] == {}
    gone = {"object": "chat.completion.deleted", "id": completion_id, "deleted": True}
    assert one.delete(path).json() == gone
    for method, where in (("GET", path), ("POST", path), ("DELETE", path), ("GET", path + "/messages")):
        assert one.request(method, where, json={"metadata": {}}).status_code == 404


def test_a_model_cannot_be_deleted(client):
    for name, status in (("tiny", 403), ("tiny-alias", 403), ("none", 404)):
        refused = client.delete(f"/v1/models/{name}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, "model")
