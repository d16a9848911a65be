"""Resumable streams: cut anywhere, gone on with at any gateway, without a gap and without a duplicate."""

from __future__ import annotations

import json

import pytest
import redis

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESUMABLE = {"x-noria-resumable": "true"}
HI = {
    "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 45, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
BODIES = {
    "chat": (CHAT, HI),
    "chat with logprobs, a stop string and two choices": (
        CHAT, {**HI, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["wörld 🎉! One tw"]},
    ),
    "a stop string that never comes": (CHAT, {**HI, "stop": ["five.x"]}),
    "completion with echo": (
        COMPLETIONS,
        {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 14, "stream": True, "logprobs": 1, "echo": True},
    ),
}  # fmt: skip


@pytest.fixture
def pair(launch, store_url, engine):
    gateways = [launch.gateway(store_url, api_key="sk-test-key,other=sk-other", resume_window=1.5) for _ in range(2)]
    clients = [gateway.client() for gateway in gateways]
    for client in clients:
        launch.eventually(lambda c=client: c.get("/readyz").status_code == 200)
    yield clients
    for client in clients:
        client.close()


def events(text):
    """(id, data) of every event."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id"), fields["data"]))
    return found


def by_choice(events):
    """Events of every choice in their order, the usage chunk under None."""
    sorted_out: dict[int | None, list] = {}
    for _, data in events:
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        place = chunk["choices"][0]["index"] if chunk["choices"] else None
        sorted_out.setdefault(place, []).append(chunk)
    return sorted_out


def resume(client, path, body, last, **headers):
    return client.post(path, json=body, headers={"last-event-id": last, **headers})


@pytest.mark.parametrize("name", BODIES)
def test_cut_behind_any_event_the_rest_is_exactly_the_rest(pair, engine, name):
    path, body = BODIES[name]
    whole = events(pair[0].post(path, json=body, headers=RESUMABLE).text)
    assert whole[-1] == (None, "[DONE]") and all(event_id for event_id, _ in whole[:-1])
    want = by_choice(whole)
    num_requests = len(engine.seen)
    for cut in range(1, len(whole)):
        last = whole[cut - 1][0]
        rest = events(resume(pair[cut % 2], path, body, last).text)
        assert rest[-1] == (None, "[DONE]")
        assert by_choice(whole[:cut] + rest) == want, (cut, last)
    assert len(engine.seen) == num_requests


def test_an_unmarked_stream_has_no_ids_and_the_same_text(client, engine):
    plain = client.post(CHAT, json=HI).text
    marked = client.post(CHAT, json=HI, headers=RESUMABLE).text
    assert "id: " not in plain.replace('"id": ', "")

    def text(stream):
        return "".join(c["choices"][0]["delta"].get("content", "") for c in by_choice(events(stream))[0])

    assert text(plain) == text(marked) == engine.answer


def read_some(client, body, num_events):
    """The first events of a stream, then hang up."""
    got = ""
    with client.stream("POST", CHAT, json=body, headers=RESUMABLE) as response:
        assert response.status_code == 200
        for part in response.iter_text():
            got += part
            if got.count("\n\n") >= num_events:
                break
    return events(got[: got.rindex("\n\n") + 2])


def test_a_running_stream_goes_on_at_another_gateway(pair, engine):
    engine.pace = 0.03
    first = read_some(pair[0], HI, 6)
    second = events(resume(pair[1], CHAT, HI, first[-1][0]).text)
    chunks = by_choice(first + second)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[0]) == engine.answer
    (usage,) = chunks[None]
    assert usage["usage"]["completion_tokens"] == len(engine.tokenizer.encode(engine.answer)) + 1
    assert not engine.cancelled and len(engine.seen) == 1


def test_a_client_that_reads_elsewhere_keeps_it_alive_beyond_the_window(pair, engine, launch):
    engine.pace = 0.1
    body = {**HI, "ignore_eos": True, "max_tokens": 45}
    first = read_some(pair[0], body, 3)
    second = events(resume(pair[1], CHAT, body, first[-1][0]).text)  # 4.5 s, the window is 1.5 s
    assert second[-1][1] == "[DONE]" and not engine.cancelled


def test_nobody_coming_back_ends_it_after_the_window(pair, engine, launch):
    engine.pace = 0.05
    first = read_some(pair[0], {**HI, "ignore_eos": True, "max_tokens": 450}, 3)
    assert not engine.cancelled
    launch.eventually(lambda: engine.cancelled, 6)
    launch.eventually(lambda: not engine.running)
    rest = resume(pair[1], CHAT, {**HI, "ignore_eos": True, "max_tokens": 450}, first[-1][0])
    assert '"code":"request_cancelled"' in rest.text and "[DONE]" not in rest.text


def test_a_stop_string_is_found_while_nobody_reads(pair, engine, launch):
    engine.pace = 0.03
    body = {**HI, "stop": ["three"], "ignore_eos": True, "max_tokens": 450}
    first = read_some(pair[0], body, 3)
    launch.eventually(lambda: engine.cancelled, 6)
    chunks = by_choice(first + events(resume(pair[1], CHAT, body, first[-1][0]).text))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[0]) == engine.answer.split("three")[0]
    assert [c["choices"][0]["finish_reason"] for c in chunks[0]][-1] == "stop"


def test_unknown_foreign_and_malformed_ids(pair, engine):
    stream = events(pair[0].post(CHAT, json=HI, headers=RESUMABLE).text)
    last = stream[4][0]
    completion = last.partition("/")[0]
    elsewhere = resume(pair[1], CHAT, HI, last, authorization="Bearer sk-other")
    unknown = resume(pair[1], CHAT, HI, "chatcmpl-0123456789abcdef0123456789ab/3")
    for refused in (
        elsewhere, unknown, resume(pair[0], CHAT, HI, "x"), resume(pair[0], CHAT, HI, f"{completion}/1,2"),
        resume(pair[0], CHAT, HI, f"{completion}/1x"), resume(pair[0], CHAT, HI, completion),
    ):  # fmt: skip
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "stream_not_found"), refused.text
    assert elsewhere.content == unknown.content
    for path, body in ((CHAT, {**HI, "max_tokens": 44}), BODIES["completion with echo"]):
        refused = resume(pair[1], path, body, last)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stream_body_mismatch")
    whole = {key: value for key, value in HI.items() if not key.startswith("stream")}
    refused = resume(pair[1], CHAT, whole, last)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")
    refused = pair[0].post(CHAT, json=whole, headers=RESUMABLE)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Noria-Resumable")
    assert len(engine.seen) == 1


def test_after_the_log_is_gone_it_is_not_found(pair, engine, store_url):
    stream = events(pair[0].post(CHAT, json=HI, headers=RESUMABLE).text)
    redis.Redis.from_url(store_url).delete(f"noria:log:{engine.seen[0].request.id}")
    gone = resume(pair[1], CHAT, HI, stream[4][0])
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "stream_not_found")
