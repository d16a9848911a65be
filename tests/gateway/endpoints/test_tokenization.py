"""POST /tokenize and /detokenize over HTTP: the ids are those that the engine would get."""

from __future__ import annotations

import pytest

MESSAGES = [{"role": "user", "content": "hi <|im_end|>"}]


def tokenize(client, path="/tokenize", **fields):
    return client.post(path, json={"model": "tiny", **fields})


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_text(client, engine, path):
    body = tokenize(client, path, prompt="Hello <|im_end|> 🎉").json()
    ids = engine.tokenizer.encode("Hello <|im_end|> 🎉")
    assert body == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    assert engine.eos not in ids
    strings = tokenize(client, path, prompt="Hell", return_token_strs=True).json()["token_strs"]
    assert strings == ["He", "ll"]


def test_a_text_longer_than_the_context_and_an_empty_one(client):
    assert tokenize(client, prompt="x" * 5000).json()["count"] == 5000
    assert tokenize(client, prompt="").json()["tokens"] == []


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"a": 1}}])
def test_messages_give_the_prompt_that_chat_would_have(client, engine, fields):
    ids = tokenize(client, messages=MESSAGES, **fields).json()["tokens"]
    client.post("/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES, "max_tokens": 1, **fields})
    assert ids == engine.seen[0].request.prompt
    assert ids.count(engine.eos) == 1  # the template's own, not the user's


def test_ids_back_to_text(client, engine):
    ids = [engine.eos, *engine.tokenizer.encode("wörld 🎉"), engine.eos]
    for path in ("/detokenize", "/v1/detokenize"):
        body = client.post(path, json={"tokens": ids}).json()
        assert body == {"prompt": "<|im_end|>wörld 🎉<|im_end|>"}
    assert client.post("/detokenize", json={"model": "tiny", "tokens": []}).json() == {"prompt": ""}


def test_the_only_model_needs_no_name(client):
    assert client.post("/tokenize", json={"prompt": "a"}).json()["count"] == 1
    assert client.post("/tokenize", json={"messages": MESSAGES}).status_code == 200
    assert tokenize(client, model="nope", prompt="a").status_code == 404


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": []}, "messages"), ("/tokenize", {"messages": MESSAGES, "n": 1}, "n"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"), ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {}, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_refused_is_named(client, engine, path, fields, param):
    response = client.post(path, json={"model": "tiny", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_key_is_needed(gateway):
    with gateway.client(key=None) as stranger:
        assert stranger.post("/tokenize", json={"prompt": "a"}).status_code == 401
