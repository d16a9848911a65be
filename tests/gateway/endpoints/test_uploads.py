"""/v1/uploads over HTTP: files in parts, whatever their order, and that nothing stays behind of what is given up."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import redis

MEGABYTE = bytes(range(256)) * 4096


@pytest.fixture
def leftovers(store_url):
    """How many entries of parts there are in the store, whole or not."""

    def count() -> int:
        with redis.Redis.from_url(store_url) as store:
            return len(store.keys("noria:*records:upload_part:*entry*"))

    return count


def create(client, size, **fields):
    body = {"filename": "a.bin", "purpose": "user_data", "mime_type": "text/plain", "bytes": size, **fields}
    return client.post("/v1/uploads", json=body)


def wait_for(condition, seconds=10.0):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def add(client, upload_id, data):
    return client.post(f"/v1/uploads/{upload_id}/parts", files={"data": data})


def complete(client, upload_id, parts, **fields):
    return client.post(f"/v1/uploads/{upload_id}/complete", json={"part_ids": parts, **fields})


def test_parts_become_a_file_in_the_order_asked_for(client, leftovers):
    before = leftovers()
    upload = create(client, len(MEGABYTE) + 5, expires_after={"anchor": "created_at", "seconds": 3600}).json()
    assert upload == {
        "id": upload["id"], "object": "upload", "bytes": len(MEGABYTE) + 5, "created_at": upload["created_at"],
        "filename": "a.bin", "purpose": "user_data", "status": "pending", "expires_at": upload["created_at"] + 3600,
    }  # fmt: skip
    last, first = add(client, upload["id"], b"12345").json(), add(client, upload["id"], MEGABYTE).json()
    assert (first["object"], first["upload_id"]) == ("upload.part", upload["id"])
    whole = MEGABYTE + b"12345"
    done = complete(client, upload["id"], [first["id"], last["id"]], md5=hashlib.md5(whole).hexdigest()).json()
    file = done.pop("file")
    assert done == {**upload, "status": "completed"}
    assert (file["object"], file["bytes"], file["status"]) == ("file", len(whole), "processed")
    assert file["expires_at"] - file["created_at"] == 3600
    assert client.get(f"/v1/files/{file['id']}").json() == file
    assert client.get(f"/v1/files/{file['id']}/content").content == whole
    assert leftovers() == before
    for refused in (add(client, upload["id"], b"x"), complete(client, upload["id"], []), cancel(client, upload["id"])):
        assert refused.status_code == 409


def cancel(client, upload_id):
    return client.post(f"/v1/uploads/{upload_id}/cancel")


def test_what_is_cancelled_leaves_nothing_and_takes_nothing(client, leftovers):
    before = leftovers()
    upload_id = create(client, 3).json()["id"]
    part = add(client, upload_id, b"abc").json()["id"]
    assert leftovers() == before + 1
    assert cancel(client, upload_id).json()["status"] == "cancelled"
    assert leftovers() == before
    for refused in (add(client, upload_id, b"abc"), complete(client, upload_id, [part])):
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "upload_id")


def test_an_upload_that_is_cancelled_while_a_part_arrives_takes_the_part_with_it(client, leftovers):
    before = leftovers()
    upload_id = create(client, 3 * len(MEGABYTE)).json()["id"]

    def arriving():
        yield b'--x\r\nContent-Disposition: form-data; name="data"; filename="p"\r\n\r\n' + MEGABYTE
        wait_for(lambda: leftovers() > before)
        assert cancel(client, upload_id).status_code == 200
        yield MEGABYTE + b"\r\n--x--\r\n"

    path, headers = f"/v1/uploads/{upload_id}/parts", {"content-type": "multipart/form-data; boundary=x"}
    refused = client.post(path, content=arriving(), headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "upload_id")
    assert leftovers() == before


def test_an_empty_file(client):
    upload_id = create(client, 0).json()["id"]
    assert complete(client, upload_id, []).json()["file"]["bytes"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bytes": -1}, "bytes"),
        ({"bytes": 2**40}, "bytes"),
        ({"bytes": 201 * 2**20, "purpose": "batch"}, "bytes"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"filename": ""}, "filename"),
        ({"mime_type": None}, "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after.seconds"),
        ({"parts": []}, "parts"),
    ],
)
def test_what_can_never_be_is_refused_at_the_beginning(client, fields, param):
    refused = create(client, 3, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_completion_that_does_not_fit_is_refused_and_may_be_tried_again(client):
    upload_id = create(client, 4).json()["id"]
    other = add(client, create(client, 4).json()["id"], b"abcd").json()["id"]
    parts = [add(client, upload_id, data).json()["id"] for data in (b"ab", b"cd")]
    for given, fields, param in (
        (parts[:1], {}, "part_ids"),
        ([parts[0], parts[0]], {}, "part_ids[1]"),
        ([other], {}, "part_ids[0]"),
        (["x/y"], {}, "part_ids[0]"),
        (parts, {"md5": hashlib.md5(b"abce").hexdigest()}, "md5"),
        (parts, {"md5": "abc"}, "md5"),
    ):
        refused = complete(client, upload_id, given, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    file = complete(client, upload_id, parts[::-1]).json()["file"]
    assert client.get(f"/v1/files/{file['id']}/content").content == b"cdab"


def test_bad_parts_leave_nothing(client, leftovers):
    before = leftovers()
    upload_id = create(client, 4).json()["id"]
    path = f"/v1/uploads/{upload_id}/parts"
    assert client.post(path, files={"file": b"abcd"}).json()["error"]["param"] == "data"
    assert client.post(path, json={"data": "abcd"}).status_code == 400
    assert add(client, upload_id, b"abcde").status_code == 413, "more than the whole file"
    assert leftovers() == before
    assert add(client, "upload_none", b"a").status_code == 404
    assert complete(client, "upload_none", []).json()["error"]["param"] == "upload_id"


def test_of_many_completions_one_makes_the_file(client):
    upload_id = create(client, 4).json()["id"]
    part = add(client, upload_id, b"abcd").json()["id"]
    before = len(client.get("/v1/files").json()["data"])
    with ThreadPoolExecutor(6) as pool:
        codes = sorted(pool.map(lambda _: complete(client, upload_id, [part]).status_code, range(6)))
    assert codes[0] == 200 and set(codes[1:]) == {409}
    assert len(client.get("/v1/files").json()["data"]) == before + 1


def test_the_official_client_uploads_in_parts(gateway, client):
    sdk = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="sk-test-key", max_retries=0)
    made = sdk.uploads.upload_file_chunked(
        file=MEGABYTE, filename="b.bin", bytes=len(MEGABYTE), mime_type="text/plain", purpose="batch", part_size=300_000
    )
    assert made.status == "completed" and made.file is not None
    assert sdk.files.content(made.file.id).content == MEGABYTE
    assert httpx.get(f"{sdk.base_url}uploads", headers={"authorization": "Bearer sk-test-key"}).status_code == 405
