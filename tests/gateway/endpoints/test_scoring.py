"""POST /score and /rerank over HTTP, the store and a scripted engine whose vectors are a function of the prompt."""

from __future__ import annotations

import math

import pytest

SIZE = 8


def cosine(engine, a, b):
    x, y = ([sum(1 for i in engine.tokenizer.encode(t) if i % SIZE == k) for k in range(SIZE)] for t in (a, b))
    return sum(p * q for p, q in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y)


def score(client, **fields):
    return client.post("/v1/score", json={"model": "tiny", **fields})


def rerank(client, path="/v1/rerank", **fields):
    return client.post(path, json={"model": "tiny", "query": "abc", "documents": ["aaz", "abd", "abc"], **fields})


@pytest.mark.parametrize(
    ("left", "right"), [("abc", "abd"), ("abc", ["abd", "xyz", "abc"]), (["abc", "q"], ["abd", "r"]), (["abc"], "a")]
)
def test_scores_are_cosines_of_pairs(client, engine, left, right):
    body = score(client, text_1=left, text_2=right).json()
    lefts, rights = ([t] if isinstance(t, str) else t for t in (left, right))
    lefts = lefts * len(rights) if len(lefts) == 1 else lefts
    assert (body["object"], body["model"]) == ("list", "tiny") and body["id"].startswith("score-")
    assert [(item["index"], item["object"]) for item in body["data"]] == [(i, "score") for i in range(len(rights))]
    for item, a, b in zip(body["data"], lefts, rights, strict=True):
        assert math.isclose(item["score"], cosine(engine, a, b), abs_tol=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(client, engine, path):
    body = rerank(client, path).json()
    documents = ["aaz", "abd", "abc"]
    near = [cosine(engine, "abc", document) for document in documents]
    order = sorted(range(3), key=lambda index: -near[index])
    assert order[0] == 2 and len(set(near)) == 3
    assert [result["index"] for result in body["results"]] == order
    assert [result["document"] for result in body["results"]] == [{"text": documents[index]} for index in order]
    assert all(math.isclose(r["relevance_score"], near[r["index"]], abs_tol=1e-6) for r in body["results"])
    assert body["usage"]["total_tokens"] == 12


def test_options_of_a_ranking(client, engine):
    assert len(rerank(client, top_n=0).json()["results"]) == 3
    documents = [{"text": "xyz"}, "abc"]
    body = rerank(client, documents=documents, top_n=1, return_documents=False).json()
    (result,) = body["results"]
    assert (result["index"], "document" in result) == (1, False)
    engine.seen.clear()
    rerank(client, documents=["abcdef" * 1000], max_tokens_per_doc=2)
    assert engine.tokenizer.encode("ab") in [claimed.request.prompt for claimed in engine.seen]


@pytest.mark.parametrize(
    ("send", "fields", "param"),
    [
        (score, {"text_1": ["a", "b"], "text_2": "c"}, "text_1"), (score, {"text_1": "a"}, "text_2"),
        (score, {"text_1": "", "text_2": "a"}, "text_1"), (score, {"text_1": "a", "text_2": []}, "text_2"),
        (score, {"text_1": "a", "text_2": 5}, "text_2"), (score, {"data_1": "a", "data_2": "b"}, "data_1"),
        (score, {"text_1": "x" * 5000, "text_2": "a"}, "text_1"),
        (rerank, {"documents": []}, "documents"), (rerank, {"documents": ["a", ""]}, "documents[1]"),
        (rerank, {"documents": [{"title": "a"}]}, "documents[0]"), (rerank, {"query": ""}, "query"),
        (rerank, {"top_n": -1}, "top_n"), (rerank, {"rank_fields": ["a"]}, "rank_fields"),
        (rerank, {"documents": ["a", "x" * 5000]}, "documents[1]"), (rerank, {"frobnicate": 1}, "frobnicate"),
        (rerank, {"max_tokens_per_doc": 5, "truncate_prompt_tokens": 5}, "max_tokens_per_doc"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_refused_is_named(client, engine, send, fields, param):
    response = send(client, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not engine.seen
