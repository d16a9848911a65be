"""HEAD, OPTIONS and what is not allowed."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("path", ["/v1/models", "/models/tiny", "/healthz", "/metrics"])
def test_head_is_a_get_without_its_body(client, path):
    head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b"" and head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/v1/models", "GET, HEAD, OPTIONS"), ("/v1/completions", "OPTIONS, POST"), ("/healthz", "GET, HEAD, OPTIONS")],
)
def test_options_tells_what_a_path_can_do_without_a_key(gateway, path, allow):
    with gateway.client(key=None) as client:
        answer = client.options(path)
    assert answer.status_code == 204 and answer.headers["allow"] == allow and answer.content == b""


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("OPTIONS", "/v1/nothing", 404, "unknown_url"),
        ("HEAD", "/v1/nothing", 404, "unknown_url"),
        ("HEAD", "/v1/completions", 405, "method_not_supported"),
        ("PUT", "/v1/completions", 405, "method_not_supported"),
        ("PATCH", "/v1/models", 405, "method_not_supported"),
    ],
)
def test_the_rest_is_refused_in_the_envelope(client, method, path, status, code):
    answer = client.request(method, path)
    assert answer.status_code == status
    if method != "HEAD":
        assert answer.json()["error"]["code"] == code


def test_answers_say_whose_they_are(client):
    headers = client.get("/v1/models").headers
    assert headers["openai-organization"] == "default" and headers["openai-version"] == "2020-10-01"
    assert headers["openai-processing-ms"].isdigit()
