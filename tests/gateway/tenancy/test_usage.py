"""The ledger and what is answered from it: equal to what clients were told, request by request and in sum."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from noria.engine.wire import keys
from noria.gateway.tenancy import names
from noria.gateway.tenancy.books import Books
from tests.gateway.conftest import NUM_PLACES, ScriptedEngine, eventually
from tests.gateway.tenancy.books import Store
from tests.gateway.tenancy.conftest import CHAT, Tenants, ask


@pytest.fixture
def books(store_url):
    return Store(store_url)


def usage(tenants: Tenants, path: str = "usage/completions", **params):
    query = {"start_time": int(time.time()) - 86_400, "limit": 31, **params}
    answer = tenants.admin.get(f"/v1/organization/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def results(tenants: Tenants, path: str = "usage/completions", **params):
    return [result for bucket in usage(tenants, path, **params)["data"] for result in bucket["results"]]


def test_the_sum_of_the_ledger_is_what_clients_were_told(tenants: Tenants, books, engine):
    project, key_id, key = tenants.key()
    tenants.post("/organization/prices/tiny", {"input": 2.0, "output": 4.0})
    try:
        time.sleep(1.1)
        with tenants.client(key, 0) as near, tenants.client(key, 1) as far, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda place: ask((near, far)[place % 2], max_tokens=1 + place), range(16)))
        told = [answer.json()["usage"] for answer in answers]
        eventually(lambda: len(books.ledger(project)) == 16)
    finally:
        tenants.admin.delete("/v1/organization/prices/tiny")
    entries = books.ledger(project)
    assert len(entries) == 16 and {entry["key"] for entry in entries} == {key_id}
    prompt, output = (sum(u[f"{kind}_tokens"] for u in told) for kind in ("prompt", "completion"))
    assert sum(int(e["prompt"]) for e in entries) == prompt and sum(int(e["output"]) for e in entries) == output
    assert {e["reason"] for e in entries} <= {"length", "stop"} and all(e["engine"] for e in entries)
    (result,) = results(tenants, group_by="project_id", project_ids=project)
    assert (result["input_tokens"], result["output_tokens"], result["num_model_requests"]) == (prompt, output, 16)
    for width in ("1m", "1h"):
        start = int(time.time()) - 3600
        found = results(tenants, bucket_width=width, start_time=start, limit=100, project_ids=project)
        assert sum(r["output_tokens"] for r in found) == output
    (cost,) = results(tenants, "costs", group_by=["project_id", "line_item"], project_ids=project)
    assert cost["amount"] == {"value": pytest.approx((prompt * 2 + output * 4) / 1e6), "currency": "usd"}
    assert cost["line_item"] == "tiny"
    path = f"/v1/organization/projects/{project}/api_keys/{key_id}"
    assert abs(tenants.admin.get(path).json()["last_used_at"] - time.time()) < 30


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_counts_what_was_read(tenants: Tenants, books, engine, stream):
    project, _, key = tenants.key()
    engine.answer, engine.pace, engine.cached = "abcXdefghijklmnopqrstuvwxyz" * 3, 0.02, 8
    fields = {"stop": "X", "max_tokens": 90, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = tenants.chat(key, **fields)
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        told = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
    else:
        told = answer.json()["usage"]
    eventually(lambda: books.ledger(project))
    (entry,) = books.ledger(project)
    assert (int(entry["output"]), entry["reason"]) == (told["completion_tokens"], "stop") == (4, "stop")
    assert int(entry["cached"]) == told["prompt_tokens_details"]["cached_tokens"] == 8


def test_a_tool_call_counts_what_the_model_wrote(tenants: Tenants, books, store_url):
    """The tokens of the markup too, which the client never sees as text."""
    project, _, key = tenants.key()
    engine = ScriptedEngine(store_url, model_id="roomy", card={"max_model_len": 4096, "kv_tokens": 8192})
    engine.answer, engine.cached = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>', 16
    engine.start()
    try:
        assert engine.registered.wait(10)
        look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        with tenants.client(key) as client:
            eventually(lambda: client.get("/v1/models/roomy").status_code == 200)
        answer = tenants.chat(key, model="roomy", max_tokens=200, tools=[look]).json()
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look", answer
        eventually(lambda: books.ledger(project))
    finally:
        engine.stop()
    (entry,) = books.ledger(project)
    told, written = answer["usage"], len(engine.tokenizer.encode(engine.answer)) + 1  # and the end of the turn
    assert int(entry["output"]) == told["completion_tokens"] == written
    assert int(entry["prompt"]) == told["prompt_tokens"] == len(engine.seen[-1].request.prompt)
    assert int(entry["cached"]) == told["prompt_tokens_details"]["cached_tokens"] == 16


def test_an_entry_or_a_ledger_that_cannot_be_posted_holds_up_no_other(tenants: Tenants, books, store_url):
    project, key_id, key = tenants.key()
    entry = {"account": f"org-default/{project}/{key_id}", "id": "x-0", "at": 1, "class": "default", "prompt": "1e300",
             "cached": 0, "output": 1, "reason": "stop", "engine": "e", "queue_ms": 0, "prefill_ms": 0,
             "decode_ms": 0}  # fmt: skip
    broken = [f"broken-{place}" for place in range(6)]
    for model in broken:
        books.client.set(keys.ledger(model), "no stream")
    try:
        books.client.sadd(names.LEDGERS, *broken)
        for wrong in ({}, {"prompt": "inf", "output": 1}, {"prompt": 1, "at": "1e300"}):
            books.client.xadd(keys.ledger("tiny"), {**entry, **wrong})
        assert tenants.chat(key).status_code == 200
        eventually(lambda: len(books.ledger(project)) == 1, 20)
        assert tenants.chat(key).status_code == 200  # the loop goes on
        eventually(lambda: len(books.ledger(project)) == 2, 20)
    finally:
        books.client.srem(names.LEDGERS, *broken)
        books.client.delete(*(keys.ledger(model) for model in broken))
    eventually(lambda: books.is_at_rest)


def test_a_fault_of_ours_is_tried_again_and_loses_nothing(tenants: Tenants, books, monkeypatch):
    project, _, key = tenants.key()
    faults, post = [], Books._post_to

    async def stumble(self, *args):
        if len(faults) < 3:
            faults.append(args)
            raise RuntimeError("a fault of ours")
        return await post(self, *args)

    monkeypatch.setattr(Books, "_post_to", stumble)
    assert tenants.chat(key).status_code == 200
    eventually(lambda: len(faults) == 3 and len(books.ledger(project)) == 1, 20)
    eventually(lambda: books.is_at_rest)


def test_what_never_ran_has_used_nothing(tenants: Tenants, books, engine):
    project, _, key = tenants.key()
    _, _, other = tenants.key()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "ignore_eos": True}
    engine.pace = 1.0
    with tenants.client(other) as busy, tenants.client(key) as client, ThreadPoolExecutor(NUM_PLACES) as pool:
        running = [pool.submit(busy.post, CHAT, json=body) for _ in range(NUM_PLACES)]
        eventually(lambda: len(engine.running) == NUM_PLACES)
        with client.stream("POST", CHAT, json={**body, "stream": True}):
            pass  # it waits: the answer has begun, its text has not
        eventually(lambda: books.ledger(project))
        engine.pace = 0.0
        for one in running:
            one.result()
    entries = books.ledger(project)
    assert [(e["prompt"], e["output"], e["reason"]) for e in entries] == [("0", "0", "cancelled")]


def test_batches_are_charged_to_the_key_that_made_them(tenants: Tenants, books):
    project, key_id, key = tenants.key(limits={"requests_per_day": 1})  # of no matter to lines of batches
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    lines = [{"custom_id": f"l{n}", "method": "POST", "url": CHAT, "body": request} for n in range(3)]
    with tenants.client(key) as client:
        data = "\n".join(map(json.dumps, lines))
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}).json()["id"]
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()["id"]
        eventually(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "completed", 20)
        counts = client.get(f"/v1/batches/{batch}").json()["request_counts"]
    assert counts == {"total": 3, "completed": 3, "failed": 0}
    eventually(lambda: len(books.ledger(project)) == 3)
    entries = books.ledger(project)
    assert [(entry["class"], entry["key"]) for entry in entries] == [("batch", key_id)] * 3
    (result,) = results(tenants, group_by="batch", api_key_ids=key_id)
    assert result["batch"] is True and result["num_model_requests"] == 3


def test_pages_of_usage_go_on_where_the_last_ended(tenants: Tenants):
    first = usage(tenants, start_time=int(time.time()) - 5 * 86_400, limit=2)
    assert first["has_more"] and len(first["data"]) == 2
    second = usage(tenants, start_time=int(time.time()) - 5 * 86_400, limit=2, page=first["next_page"])
    assert second["data"][0]["start_time"] == first["data"][-1]["end_time"]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"start_time": None}, "start_time"),
        ({"group_by": "user_id"}, "group_by"),
        ({"user_ids": "u"}, "user_ids"),
        ({"bucket_width": "1w"}, "bucket_width"),
        ({"limit": 1000}, "limit"),
    ],
)
def test_what_cannot_be_answered_is_named(tenants: Tenants, params, param):
    query = {"start_time": 1, **params}
    answer = tenants.admin.get("/v1/organization/usage/completions", params={k: v for k, v in query.items() if v})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
