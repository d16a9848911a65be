"""Keys, bodies, headers and unknown routes: what every endpoint shares."""

from __future__ import annotations

import hashlib
import json
import socket

import pytest

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def raw(client, data, **headers):
    return client.post(CHAT, content=data, headers={"content-type": "application/json", **headers})


@pytest.mark.parametrize("header", [None, "Bearer wrong", "sk-test-key", "Bearer", "Basic sk-test-key", "Bearer ü"])
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("GET", "/models/x"), ("POST", CHAT), ("POST", "/v1/completions")]
)
def test_wrong_keys_are_refused_before_the_body_is_read(gateway, method, path, header):
    headers = {} if header is None else {"authorization": header.encode()}
    with gateway.client(key=None) as client:
        response = client.request(method, path, headers=headers, content=b"{oops" if method == "POST" else None)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    if header and header.startswith("Bearer w"):
        assert "wrong" not in response.text and hashlib.sha256(b"wrong").hexdigest() not in response.text


def test_every_configured_key_works(gateway):
    with gateway.client(key="sk-other") as client:
        assert client.post(CHAT, json=BODY).status_code == 200


def test_without_keys_everybody_is_let_in(launch, store_url):
    gateway = launch.gateway(store_url)
    gateway.app.state.keys = type(gateway.app.state.keys)(())
    with gateway.client(key=None) as client:
        launch.eventually(lambda: client.post(CHAT, json=BODY).status_code == 200)


@pytest.mark.parametrize(
    "data",
    [
        b"{oops", b"", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "temperature": Infinity}', b'{"model": "tiny", "temperature": 1e999}',
        b'{"model": "tiny", "messages": ' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": '
        + b"[" * 900 + b"]" * 900 + b"}}",
    ],
    ids=lambda data: repr(data[:60]),
)  # fmt: skip
def test_bad_bodies_are_400(client, data):
    response = raw(client, data)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_content_type_does_not_matter_if_it_parses(client):
    assert raw(client, json.dumps(BODY), **{"content-type": "text/plain"}).status_code == 200


def test_large_bodies_are_413_declared_or_not(client):
    big = json.dumps({**BODY, "user": "x" * (11 * 2**20)}).encode()
    assert raw(client, big).status_code == 413

    def pieces():
        for start in range(0, len(big), 2**20):
            yield big[start : start + 2**20]

    assert raw(client, pieces()).status_code == 413


def test_request_ids_are_kept_if_sane(client):
    assert client.get("/v1/models", headers={"x-request-id": "my-id.7"}).headers["x-request-id"] == "my-id.7"
    for odd in ("x" * 200, "a b", "<script>"):
        kept = client.get("/nope", headers={"x-request-id": odd}).headers["x-request-id"]
        assert kept != odd and kept.startswith("req_")


def test_unknown_routes_and_methods_have_the_envelope(client):
    for method, path, status in (
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/models", 405),
    ):
        response = client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_bare_paths_and_trailing_slashes_work(client):
    assert client.post("/chat/completions", json=BODY).status_code == 200
    assert client.post(CHAT + "/", json=BODY).status_code == 200


def test_any_page_may_call_a_server_that_asks_for_a_key(client):
    origin = {"origin": "https://app.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    preflight = client.options(CHAT, headers={**origin, **asked})
    assert preflight.status_code == 200 and "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    for body, status in ((BODY, 200), ({}, 400)):
        answer = client.post(CHAT, json=body, headers=origin)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_no_page_may_call_a_server_that_is_open_unless_the_operator_says_so(launch, store_url):
    origin = {"origin": "https://app.example"}
    with launch.gateway(store_url, api_key="").client(key=None) as unasked:
        assert "access-control-allow-origin" not in unasked.get("/healthz", headers=origin).headers
    gateway = launch.gateway(store_url, cors_origins="https://app.example")
    with gateway.client(key=None) as other:
        assert other.get("/healthz", headers=origin).headers["access-control-allow-origin"] == "https://app.example"
        preflight = other.options(CHAT, headers={**origin, "access-control-request-method": "POST"})
        assert preflight.status_code == 200


def test_huge_and_endless_headers_are_cut_off(gateway):
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: ")
        answer = b""
        try:
            for _ in range(4096):
                connection.sendall(b"a" * 4096)
            answer = connection.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            return
    assert answer.startswith(b"HTTP/1.1 431") and b'"error"' in answer


def test_a_large_head_in_one_piece_is_refused_too(gateway):
    field = b"x-long: " + b"a" * 30_000 + b"\r\n"
    for count, status in ((2, b"200"), (3, b"431")):
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + field * count + b"\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_the_rest_of_a_body_that_is_too_large_is_not_read(gateway, client):
    key = client.headers["authorization"]
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\ncontent-length: {2**40}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(head.encode())
        answer = b""
        while part := connection.recv(4096):  # to its end, with nothing of the body sent
            answer += part
    assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer


def test_garbage_gets_the_envelope_too(gateway):
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer
