"""/v1/files over HTTP: what may be uploaded, what is listed, and that nothing stays behind of what went wrong."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import httpx
import pytest
import redis

BOUNDARY = "----x"


@pytest.fixture
def leftovers(store_url):
    """How many entries of files there are in the store, whether anybody sees them or not."""

    def count() -> int:
        with redis.Redis.from_url(store_url) as store:
            return len(store.keys("noria:*records:file:entry:*"))

    return count


def upload(client, content=b"hello\n", name="in.jsonl", **fields):
    return client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch", **fields})


def test_a_file_is_uploaded_shown_read_and_deleted(client):
    content = bytes(range(256)) * 4096  # a megabyte: several pieces
    answer = upload(client, content, "wörld.bin", purpose="user_data")
    assert answer.status_code == 200
    file = answer.json()
    assert file == {
        "id": file["id"], "object": "file", "bytes": len(content), "created_at": file["created_at"],
        "expires_at": None, "filename": "wörld.bin", "purpose": "user_data", "status": "processed",
        "status_details": None,
    }  # fmt: skip
    assert abs(file["created_at"] - time.time()) < 5 and file["id"].startswith("file-")
    path = f"/v1/files/{file['id']}"
    assert client.get(path).json() == file
    read = client.get(path + "/content")
    assert read.content == content and read.headers["content-type"] == "application/octet-stream"
    assert "w%C3%B6rld.bin" in read.headers["content-disposition"]
    assert client.delete(path).json() == {"id": file["id"], "object": "file", "deleted": True}
    for method, gone in (("GET", path), ("GET", path + "/content"), ("DELETE", path)):
        refused = client.request(method, gone)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "id")


def test_an_empty_file_and_fields_behind_the_file(client):
    body = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="e.jsonl"\r\n\r\n\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nevals\r\n--{BOUNDARY}--\r\n'
    )
    answer = client.post("/v1/files", content=body, headers=form_headers())
    assert (answer.json()["bytes"], answer.json()["purpose"]) == (0, "evals")
    assert client.get(f"/v1/files/{answer.json()['id']}/content").content == b""


def form_headers() -> dict[str, str]:
    return {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def test_files_expire(client):
    batch = upload(client).json()
    assert batch["expires_at"] == batch["created_at"] + 30 * 86_400
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    assert upload(client, **fields).json()["expires_at"] - batch["created_at"] in (3600, 3601)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"color": "red"}, "color"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"}, "expires_after.seconds"),
        ({"expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after": "3600"}, "expires_after"),
        ({"purpose": "x" * 9000}, "purpose"),
    ],
)
def test_bad_fields_are_refused_and_leave_nothing(client, leftovers, fields, param):
    before = leftovers()
    refused = upload(client, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert leftovers() == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form at all",
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nnever ends".encode(),
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--{BOUNDARY}--\r\n".encode(),
    ],
)  # fmt: skip
def test_bad_forms_are_refused_and_leave_nothing(client, leftovers, body):
    before = leftovers()
    assert client.post("/v1/files", content=body, headers=form_headers()).status_code == 400
    assert leftovers() == before


def test_only_forms_are_taken(client):
    refused = client.post("/v1/files", json={"purpose": "batch"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_content_type")
    headers = {**form_headers(), "content-encoding": "gzip"}
    assert client.post("/v1/files", content=b"x", headers=headers).status_code == 415


def test_a_client_that_hangs_up_leaves_nothing(gateway, client, leftovers, launch):
    before = leftovers()
    with socket.create_connection(("127.0.0.1", gateway.port)) as sock:
        head = (
            "POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-test-key\r\ncontent-length: 99999999\r\n"
            f"content-type: {form_headers()['content-type']}\r\n\r\n"
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        )
        sock.sendall(head.encode() + b"x" * 600_000)
        launch.eventually(lambda: leftovers() == before + 1)
        assert leftovers() - before == 1 and client.get("/v1/files", params={"limit": 1}).status_code == 200
    launch.eventually(lambda: leftovers() == before)


def test_bounds_of_size_time_and_storage(launch, store_url, engine):
    limits = {"max_file_bytes": 300_000, "max_stored_file_bytes": 700_000, "body_timeout": 0.5}
    gateway = launch.gateway(store_url, api_key="small=sk-small", **limits)
    with gateway.client("sk-small") as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        assert upload(client, b"x" * 300_000).status_code == 200
        assert upload(client, b"x" * 300_001).status_code == 413
        assert upload(client, b"x" * 900_000).status_code == 413  # told by its length alone
        second = upload(client, b"x" * 300_000)
        full = upload(client, b"x" * 300_000)
        assert (full.status_code, full.json()["error"]["code"]) == (400, "storage_limit_exceeded")
        assert client.delete(f"/v1/files/{second.json()['id']}").status_code == 200
        assert upload(client, b"x" * 300_000).status_code == 200

        def trickle():
            yield f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
            for _ in range(100):
                time.sleep(0.05)
                yield b"x"

        began = time.monotonic()
        with suppress(httpx.WriteError):  # the connection is closed under whoever goes on sending
            assert client.post("/v1/files", content=trickle(), headers=form_headers()).status_code == 408
        assert time.monotonic() - began < 3
        assert len(client.get("/v1/files").json()["data"]) == 2


def test_lists_are_pages_of_a_tenants_own_files(launch, store_url, engine):
    gateway = launch.gateway(store_url, api_key="one=sk-one,two=sk-two")
    with gateway.client("sk-one") as one, gateway.client("sk-two") as two:
        launch.eventually(lambda: one.get("/readyz").status_code == 200)
        ids = [upload(one, purpose=purpose).json()["id"] for purpose in ("batch", "evals", "batch", "vision", "batch")]

        def listed(**query):
            answer = one.get("/v1/files", params=query).json()
            assert answer["object"] == "list"
            names = [ids.index(file["id"]) for file in answer["data"]]
            assert (answer["first_id"], answer["last_id"]) == (
                (ids[names[0]], ids[names[-1]]) if names else (None, None)
            )
            return names, answer["has_more"]

        assert listed() == ([4, 3, 2, 1, 0], False)
        assert listed(order="asc", limit=2) == ([0, 1], True)
        assert listed(order="asc", limit=2, after=ids[2]) == ([3, 4], False)
        assert listed(purpose="batch", limit=2) == ([4, 2], True)
        assert listed(purpose="batch", limit=2, after=ids[2]) == ([0], False)
        assert listed(purpose="assistants") == ([], False) and listed(limit=0, after="x") == ([], False)
        assert two.get("/v1/files").json()["data"] == []
        assert two.get(f"/v1/files/{ids[0]}").status_code == 404
        wrong = (
            {"limit": "-1"},
            {"limit": "10001"},
            {"limit": "x"},
            {"order": "up"},
            {"after": "no"},
            {"color": "red"},
        )
        for query in wrong:
            refused = one.get("/v1/files", params=query)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(query)))
