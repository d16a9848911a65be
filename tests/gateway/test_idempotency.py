"""Idempotency-Key: one generation and one answer, however often and wherever it is asked for."""

from __future__ import annotations

import threading
import uuid

import msgspec
import pytest
import redis

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 45}
TEXTS = {"model": "tiny", "prompt": ["ab", "c"], "n": 2, "max_tokens": 12, "logprobs": 2, "echo": True}


def keyed(client, path, body, key, **headers):
    return client.post(path, json=body, headers={"idempotency-key": key, **headers})


@pytest.fixture
def key():
    return uuid.uuid4().hex


@pytest.fixture
def pair(launch, store_url, engine):
    """Clients of two gateways on one store, which know the same two tenants."""
    keys = "sk-test-key,other=sk-other"
    gateways = [launch.gateway(store_url, api_key=keys, resume_window=1.0) for _ in range(2)]
    clients = [gateway.client() for gateway in gateways]
    for client in clients:
        launch.eventually(lambda c=client: c.get("/readyz").status_code == 200)
    yield clients
    for client in clients:
        client.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (COMPLETIONS, TEXTS), (CHAT, {**HI, "stop": ["two th"]})])
def test_a_repeat_is_the_same_answer_to_the_byte(pair, engine, key, path, body, stream):
    body = {**body, "stream": stream}
    if stream and path == COMPLETIONS:
        body.update(prompt="ab", n=1)  # of several choices the events are the same, their interleaving is not
    answers = [keyed(client, path, body, key) for client in (*pair, *pair)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.content for answer in answers}) == 1
    assert len(engine.seen) == (4 if isinstance(body.get("prompt"), list) else 1)
    assert all(claimed.request.logged for claimed in engine.seen)
    other = keyed(pair[0], path, body, key + "x")
    assert other.content != answers[0].content and other.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_attaches_to_what_is_running(pair, engine, launch, key, stream):
    engine.pace = 0.02
    answers = {}

    def ask(place, client):
        answers[place] = keyed(client, CHAT, {**HI, "stream": stream}, key)

    threads = [threading.Thread(target=ask, args=(place, pair[place % 2])) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {answer.status_code for answer in answers.values()} == {200}
    assert len({answer.content for answer in answers.values()}) == 1
    assert len(engine.seen) == 1


def test_a_repeat_attaches_to_what_a_dead_gateway_could_not_note(pair, engine, launch, key, store_url, monkeypatch):
    """It died with its requests on the queue, and the record under the key does not say so yet."""
    monkeypatch.setattr("noria.gateway.tickets._PATIENCE", 0.2)
    store = redis.Redis.from_url(store_url)
    before = records(store_url)
    first = keyed(pair[0], COMPLETIONS, TEXTS, key)
    (name,) = records(store_url) - before
    launch.eventually(lambda: b"answer" in store.get(name))
    record = msgspec.msgpack.decode(store.get(name))
    store.set(name, msgspec.msgpack.encode({k: record[k] for k in ("digest", "group", "created", "fingerprint")}))
    assert keyed(pair[1], COMPLETIONS, TEXTS, key).json() == first.json()
    assert len(engine.seen) == 4
    store.delete(f"noria:log:{record['group']}-3")  # one of its requests has not begun, as far as is known
    store.set(name, msgspec.msgpack.encode({k: record[k] for k in ("digest", "group", "created", "fingerprint")}))
    in_use = keyed(pair[1], COMPLETIONS, TEXTS, key)
    assert (in_use.status_code, in_use.json()["error"]["code"]) == (409, "idempotency_key_in_use")


def test_a_retry_after_hanging_up_gets_the_answer(pair, engine, launch, key):
    engine.pace = 0.02
    impatient = pair[0]
    impatient.timeout = 0.3
    with pytest.raises(Exception, match="timed out"):
        keyed(impatient, CHAT, HI, key)
    answer = keyed(pair[1], CHAT, HI, key)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == engine.answer
    assert len(engine.seen) == 1 and not engine.cancelled


def test_nobody_coming_back_is_a_cancellation_and_frees_the_key(pair, engine, launch, key):
    engine.pace = 0.05
    pair[0].timeout = 0.3
    long = {**HI, "max_tokens": 400, "ignore_eos": True}
    with pytest.raises(Exception, match="timed out"):
        keyed(pair[0], CHAT, long, key)
    launch.eventually(lambda: engine.cancelled)
    engine.pace = 0.0
    launch.eventually(lambda: not engine.running)
    again = {**long, "max_tokens": 5}
    launch.eventually(lambda: keyed(pair[1], CHAT, again, key).status_code == 200)  # the key is free soon after


@pytest.mark.parametrize("stream", [False, True])
def test_another_body_under_the_key_is_a_conflict(pair, engine, key, stream):
    assert keyed(pair[0], CHAT, HI, key).status_code == 200
    for path, body in ((CHAT, {**HI, "max_tokens": 3, "stream": stream}), (COMPLETIONS, {**TEXTS, "stream": stream})):
        refused = keyed(pair[1], path, body, key)
        assert refused.status_code == 409 and refused.headers["x-should-retry"] == "false"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("idempotency_error", "idempotency_key_reused")
        assert error["param"] == "Idempotency-Key"
    assert len(engine.seen) == 1
    reordered = dict(reversed(HI.items()))
    assert keyed(pair[0], CHAT, reordered, key).status_code == 200
    assert len(engine.seen) == 1


def test_a_key_is_the_tenants_own(pair, engine, key):
    first = keyed(pair[0], CHAT, HI, key)
    other = keyed(pair[0], CHAT, HI, key, authorization="Bearer sk-other")
    assert other.status_code == 200 and other.json()["id"] != first.json()["id"]
    assert [claimed.request.tenant for claimed in engine.seen] == ["default", "other"]


@pytest.mark.parametrize("value", ["", "x" * 256])
def test_bad_keys_are_refused(client, value):
    refused = keyed(client, CHAT, HI, value)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_the_longest_key_and_odd_characters_are_fine(client, engine):
    odd = ("é:{}*" + uuid.uuid4().hex * 8)[:255].encode("latin-1")
    assert client.post(CHAT, json=HI, headers={b"idempotency-key": odd}).status_code == 200


def records(store_url):
    return set(redis.Redis.from_url(store_url).keys("noria:*record:key:*"))


def test_a_refused_first_attempt_leaves_nothing_behind(pair, engine, launch, key, store_url):
    before = records(store_url)
    assert keyed(pair[0], CHAT, {**HI, "temperature": 9}, key).status_code == 400
    assert keyed(pair[0], CHAT, {**HI, "model": "nope"}, key).status_code == 404
    assert keyed(pair[0], CHAT, {**HI, "max_tokens": 4096}, key).status_code == 400
    assert records(store_url) == before
    assert keyed(pair[0], CHAT, HI, key).status_code == 200
    assert len(records(store_url) - before) == 1


def test_an_error_is_not_kept(pair, engine, key):
    engine.fail_with = "boom"
    failed = keyed(pair[0], CHAT, HI, key)
    assert failed.status_code == 500
    engine.fail_with = None
    assert keyed(pair[1], CHAT, HI, key).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_outlives_its_log(pair, engine, launch, key, stream, store_url):
    body = {**HI, "stream": stream, "n": 1, "logprobs": True, "top_logprobs": 2}
    first = keyed(pair[0], CHAT, body, key)
    store = redis.Redis.from_url(store_url)
    names = [f"noria:log:{claimed.request.id}" for claimed in engine.seen]
    launch.eventually(lambda: b"answer" in b"".join(store.get(n) or b"" for n in store.keys("noria:*record:key:*")))
    assert store.delete(*names) == 1
    assert keyed(pair[1], CHAT, body, key).content == first.content
    assert len(engine.seen) == 1


def test_an_answer_of_which_nothing_is_left_is_a_clear_conflict(pair, engine, launch, key, store_url, monkeypatch):
    monkeypatch.setattr("noria.gateway.tickets.MAX_ANSWER_BYTES", 10)
    assert keyed(pair[0], CHAT, HI, key).status_code == 200
    redis.Redis.from_url(store_url).delete(f"noria:log:{engine.seen[0].request.id}")
    gone = keyed(pair[1], CHAT, HI, key)
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "idempotency_result_expired")
