"""Compressed bodies: unpacked, bounded, and refused in plain words."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

PATH = "/v1/completions"
BODY = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
    ],
)
def test_compressed_bodies_are_read(client, encoding, packed):
    assert client.post(PATH, content=packed, headers={"content-encoding": encoding}).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "packed", "status", "code"),
    [
        ("br", BODY, 415, "unsupported_content_encoding"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415, "unsupported_content_encoding"),
        ("gzip", BODY, 400, "invalid_body"),
        ("gzip", gzip.compress(BODY)[:-9], 400, "invalid_body"),
        ("gzip", gzip.compress(BODY) + b"more", 400, "invalid_body"),
        ("gzip", b"", 400, "invalid_body"),
        ("gzip", gzip.compress(b" " * 200_000_000, 9), 413, "request_too_large"),
    ],
)
def test_what_cannot_be_unpacked_is_refused(client, encoding, packed, status, code):
    answer = client.post(PATH, content=packed, headers={"content-encoding": encoding})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
