"""What tests of batches share: making lines, batches and sense of their results."""

from __future__ import annotations

import json
import time

from noria.gateway.schemas import batches as schema

CHAT = "/v1/chat/completions"


def line(custom_id, url=CHAT, **body):
    asked = {"model": "tiny", "max_tokens": 4, **body}
    if url == CHAT:
        asked.setdefault("messages", [{"role": "user", "content": custom_id}])
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


def jsonl(lines):
    return "".join(text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines).encode()


def upload(client, lines):
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    answer = client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    return answer.json()["id"]


def create(client, lines, endpoint=CHAT, **fields):
    body = {"input_file_id": upload(client, lines), "endpoint": endpoint, "completion_window": "24h", **fields}
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def state(client, batch):
    return client.get(f"/v1/batches/{batch['id']}").json()


def finished(client, batch, seconds=20.0):
    until = time.monotonic() + seconds
    while (now := state(client, batch))["status"] not in schema.OVER:
        assert time.monotonic() < until, now
        time.sleep(0.02)
    return now


def results(client, batch):
    """By kind of file: custom id -> result; no custom id comes twice in all."""
    found, seen = {}, []
    for kind in ("output", "error"):
        file_id = batch[f"{kind}_file_id"]
        content = client.get(f"/v1/files/{file_id}/content").text if file_id else ""
        listed = [json.loads(text) for text in content.splitlines()]
        found[kind] = {result["custom_id"]: result for result in listed}
        seen += [result["custom_id"] for result in listed]
    assert len(seen) == len(set(seen))
    return found["output"], found["error"]
