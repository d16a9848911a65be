"""POST /v1/embeddings over HTTP, the store and a scripted engine whose vectors are a function of the prompt."""

from __future__ import annotations

import base64
import math
import struct

import openai
import pytest

SIZE = 8


def post(client, given="ab", **fields):
    return client.post("/v1/embeddings", json={"model": "tiny", "input": given, **fields})


def expected(ids, dimensions=SIZE, normalize=True):
    counts = [float(sum(1 for i in ids if i % SIZE == place)) for place in range(dimensions)]
    length = math.hypot(*counts) if normalize else 1.0
    return [count / (length or 1.0) for count in counts]


def close(found, wanted):
    return len(found) == len(wanted) and all(abs(a - b) < 1e-6 for a, b in zip(found, wanted, strict=True))


def test_one_text(client, engine):
    response = post(client)
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    ids = engine.tokenizer.encode("ab")
    (item,) = body.pop("data")
    assert (item["object"], item["index"]) == ("embedding", 0) and close(item["embedding"], expected(ids))
    assert body == {"object": "list", "model": "tiny", "usage": {"prompt_tokens": 2, "total_tokens": 2}}
    request = engine.seen[0].request
    assert (request.prompt, request.pooling, request.sampling.max_tokens) == (ids, "mean", 0)


@pytest.mark.parametrize(
    "given", [["a", "bb", "ccc"], [[1, 2], [3], [4, 5, 6]], [7, 8, 9], "x", ["x" * n for n in range(1, 301)]], ids=repr
)
def test_inputs_keep_their_order(client, engine, given):
    body = post(client, given).json()
    inputs = [given] if isinstance(given[0], int) or isinstance(given, str) else given
    prompts = [engine.tokenizer.encode(text) if isinstance(text, str) else text for text in inputs]
    assert [item["index"] for item in body["data"]] == list(range(len(prompts)))
    assert all(close(item["embedding"], expected(ids)) for item, ids in zip(body["data"], prompts, strict=True))
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_base64_is_little_endian_float32(client, engine):
    floats = post(client, "hello").json()["data"][0]["embedding"]
    packed = base64.b64decode(post(client, "hello", encoding_format="base64").json()["data"][0]["embedding"])
    assert list(struct.unpack(f"<{SIZE}f", packed)) == floats


def test_the_sdk_gets_floats_by_default(gateway, engine):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-test-key", max_retries=0) as sdk:
        answer = sdk.embeddings.create(model="tiny-alias", input=["one", "two"])
    assert close(answer.data[1].embedding, expected(engine.tokenizer.encode("two"))) and answer.model == "tiny"


def test_dimensions_shorten_and_normalise_again(client, engine):
    ids = list(range(64, 100))
    for fields in (
        {"dimensions": 3},
        {"dimensions": SIZE},
        {"normalize": False},
        {"dimensions": 2, "normalize": False},
    ):
        found = post(client, ids, **fields).json()["data"][0]["embedding"]
        assert close(found, expected(ids, fields.get("dimensions", SIZE), fields.get("normalize", True)))
    assert post(client, [7], dimensions=3).json()["data"][0]["embedding"] == [0.0, 0.0, 0.0]  # nothing to normalise


def test_truncation_and_priority(client, engine):
    assert post(client, "abcdef", truncate_prompt_tokens=2, priority=-3).json()["usage"]["prompt_tokens"] == 2
    assert (engine.seen[0].request.prompt, engine.seen[0].request.priority) == (engine.tokenizer.encode("ef"), -3)
    assert post(client, "x" * 5000, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 512


def test_the_context_is_a_bound_for_each_input(client, engine):
    limit = engine.card.max_model_len
    assert post(client, [[5] * limit, [6]]).status_code == 200
    engine.seen.clear()
    for given, param in (([5] * (limit + 1), "input"), ([[6], [5] * (limit + 1)], "input[1]"), ("x" * 10**6, "input")):
        error = post(client, given).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param) and str(limit) in error["message"]
    assert not engine.seen


REFUSED = [
    ({"input": ""}, "input"), ({"input": ["a", ""]}, "input"), ({"input": []}, "input"), ({"input": [[]]}, "input"),
    ({"input": ["a", 1]}, "input"), ({"input": ["a"] * 2049}, "input"), ({"input": [10**6]}, "input"),
    ({"input": {}}, "input"), ({"dimensions": 0}, "dimensions"), ({"dimensions": SIZE + 1}, "dimensions"),
    ({"encoding_format": "int8"}, "encoding_format"), ({"messages": []}, "messages"), ({"user": 5}, "user"),
    ({"frobnicate": 1}, "frobnicate"), ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"model": 5}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_named(client, engine, fields, param):
    response = post(client, **{"given": "ab", **fields} if "input" not in fields else {"given": fields["input"]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.seen


def test_a_model_without_vectors_says_so(launch, store_url):
    launch.engine(store_url, id="mute", embedding_size=0)
    gateway = launch.gateway(store_url)
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/v1/models/mute").json().get("status") == "ready")
        error = client.post("/v1/embeddings", json={"model": "mute", "input": "a"}).json()["error"]
    assert error["param"] == "model" and "embeddings" in error["message"]


def test_a_fault_of_one_input_is_the_requests_and_cancels_the_others(client, engine):
    engine.fail_with = "the model broke"
    response = post(client, ["a"] * 200)
    assert (response.status_code, response.json()["error"]["message"]) == (500, "the model broke")
    assert len(engine.seen) < 200


def test_a_client_that_leaves_cancels(client, engine, launch):
    engine.pace = 0.3
    with pytest.raises(Exception, match="timed out"):
        client.post("/v1/embeddings", json={"model": "tiny", "input": ["a"] * 100}, timeout=0.2)
    engine.pace = 0.0
    launch.eventually(lambda: not engine.running)
    assert len(engine.seen) <= 64
