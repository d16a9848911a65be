"""/v1/batches over HTTP, with real gateways, a real store and a scripted engine: every line has exactly one result."""

from __future__ import annotations

import json

from tests.gateway.batching import CHAT, create, finished, line, results, upload


def test_a_batch_runs_in_its_own_class_and_leaves_two_files(client, engine):
    lines = [line(f"id-{n}") for n in range(20)] + [line("bad", temperature=3), line("long", max_tokens=9999)]
    life = {"anchor": "created_at", "seconds": 7200}
    batch = create(client, lines, metadata={"team": "a"}, output_expires_after=life)
    assert batch["status"] in ("validating", "in_progress") and batch["object"] == "batch"
    assert (batch["output_file_id"], batch["errors"]) == (None, None)
    assert batch["expires_at"] == batch["created_at"] + 24 * 3600
    done = finished(client, batch)
    assert done["status"] == "completed" and done["model"] == "tiny" and done["metadata"] == {"team": "a"}
    assert done["request_counts"] == {"total": 22, "completed": 20, "failed": 2}
    assert done["created_at"] <= done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]
    output, errors = results(client, done)
    assert set(output) == {f"id-{n}" for n in range(20)} and set(errors) == {"bad", "long"}
    one = output["id-7"]
    assert one["id"].startswith("batch_req_") and one["error"] is None
    assert one["response"]["status_code"] == 200 and one["response"]["request_id"].startswith("req_")
    assert one["response"]["body"]["choices"][0]["message"]["content"] == "Hello,"
    assert errors["bad"]["response"]["status_code"] == 400 and errors["bad"]["error"] is None
    assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"
    spent = [result["response"]["body"]["usage"] for result in output.values()]
    assert done["usage"]["output_tokens"] == sum(usage["completion_tokens"] for usage in spent) > 0
    assert done["usage"]["total_tokens"] == sum(usage["total_tokens"] for usage in spent)
    assert {claimed.request.service_class for claimed in engine.seen} == {"batch"}
    assert len(engine.seen) == 20
    file = client.get(f"/v1/files/{done['output_file_id']}").json()
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
    assert file["expires_at"] - file["created_at"] == 7200
    assert "noria_gateway_batch_lines_total" in client.get("/metrics").text


def test_completions_and_odd_lines_of_input(client, engine):
    texts = [
        "\ufeff" + json.dumps(line("ü", "/v1/completions", prompt="a")) + "\r\n",
        "\n   \n",
        json.dumps(line("last", "/v1/completions", prompt="a", service_tier="default")),  # no newline
    ]
    done = finished(client, create(client, texts, "/v1/completions"))
    assert done["status"] == "completed" and done["error_file_id"] is None
    output, _ = results(client, done)
    assert output["ü"]["response"]["body"]["choices"][0]["text"] == "Hello,"
    assert set(output) == {"ü", "last"}


def test_an_input_that_cannot_run_fails_as_a_whole_with_its_lines_named(client, engine):
    lines = [
        line("a"), "{no json\n", "[1]\n", line("a"), line("b", model="other"), line("c", "/v1/completions"),
        {**line("d"), "method": "GET"}, {"custom_id": "e", "method": "POST", "url": CHAT}, {**line("f"), "x": 1},
        {"method": "POST", "url": CHAT, "body": {"model": "tiny"}}, line("g", stream=True),
        line("h", service_tier="priority"),
    ]  # fmt: skip
    done = finished(client, create(client, lines))
    assert done["status"] == "failed" and done["failed_at"] and done["in_progress_at"] is None
    told = [(fault["line"], fault["code"], fault["param"]) for fault in done["errors"]["data"]]
    assert told == [
        (2, "invalid_json_line", None), (3, "invalid_json_line", None), (4, "duplicate_custom_id", "custom_id"),
        (5, "model_mismatch", "body.model"), (6, "url_mismatch", "url"), (7, "invalid_method", "method"),
        (8, "missing_required_parameter", "body"), (9, "unknown_parameter", "x"),
        (10, "missing_required_parameter", "custom_id"), (11, "invalid_request", "body.stream"),
        (12, "invalid_request", "body.service_tier"),
    ]  # fmt: skip
    assert done["errors"]["object"] == "list" and (done["output_file_id"], done["error_file_id"]) == (None, None)
    assert not engine.seen


def test_more_requests_than_allowed(client, engine, monkeypatch):
    monkeypatch.setattr("noria.gateway.batches.lines.MAX_LINES", 3)
    assert finished(client, create(client, [line(str(n)) for n in range(3)]))["status"] == "completed"
    failed = finished(client, create(client, [line(str(n)) for n in range(4)]))
    assert failed["errors"]["data"][0]["code"] == "too_many_tasks"


def test_what_is_refused_at_the_door(client, engine):
    file_id = upload(client, [line("a")])
    other = client.post("/v1/files", files={"file": ("x", b"x")}, data={"purpose": "user_data"}).json()["id"]
    fine = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for change, status, param in (
        ({"input_file_id": "file-none"}, 404, "input_file_id"), ({"input_file_id": other}, 400, "input_file_id"),
        ({"endpoint": "/v1/videos"}, 400, "endpoint"), ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k"), ({"color": 1}, 400, "color"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ({"endpoint": None}, 400, "endpoint"),
    ):  # fmt: skip
        refused = client.post("/v1/batches", json={**fine, **change})
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    for method, path in (("GET", "/v1/batches/batch_no"), ("POST", "/v1/batches/batch_no/cancel")):
        assert client.request(method, path).status_code == 404
    assert client.get("/v1/batches", params={"limit": 101}).status_code == 400
    assert client.post(CHAT, json={**line("a")["body"], "service_tier": "batch"}).status_code == 400


def test_lists_are_pages_of_a_tenants_own_batches(launch, store_url, engine):
    gateway = launch.gateway(store_url, api_key="one=sk-one,two=sk-two")
    with gateway.client("sk-one") as one, gateway.client("sk-two") as two:
        launch.eventually(lambda: one.get("/readyz").status_code == 200)
        ids = [finished(one, create(one, [line("a")]))["id"] for _ in range(3)]
        first = one.get("/v1/batches", params={"limit": 2}).json()
        assert first["has_more"] and first["first_id"] == first["data"][0]["id"]
        rest = one.get("/v1/batches", params={"limit": 2, "after": first["last_id"]}).json()
        assert not rest["has_more"] and {b["id"] for b in (*first["data"], *rest["data"])} == set(ids)
        assert two.get("/v1/batches").json()["data"] == [] and two.get(f"/v1/batches/{ids[0]}").status_code == 404
        assert [claimed.request.tenant for claimed in engine.seen] == ["one"] * 3
