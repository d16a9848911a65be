"""Limits over HTTP: exact under races, honest in their headers, and given back whatever becomes of a request."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from noria.engine.wire.broker import BrokerUnavailable
from noria.gateway.errors import EngineFault
from noria.gateway.tenancy.answers import duration
from tests.gateway.conftest import NUM_PLACES, eventually
from tests.gateway.tenancy.books import Store
from tests.gateway.tenancy.conftest import CHAT, Tenants, ask


@pytest.fixture
def books(store_url):
    return Store(store_url)


def error(response):
    found = response.json()["error"]
    return response.status_code, found["type"], found["code"]


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0s"), (-5, "0s"), (120, "120ms"), (1000, "1s"), (8640, "8.64s"), (360_000, "6m0s"), (3_723_500, "1h2m3.5s"),
     (86_400_000, "24h0m0s")],
)  # fmt: skip
def test_durations_are_go_s(milliseconds, text):
    assert duration(milliseconds) == text


def test_many_at_once_over_two_gateways_let_exactly_so_many_through(tenants: Tenants, books, engine):
    _, _, key = tenants.key(limits={"requests_per_day": 25})
    engine.answer = ""
    with tenants.client(key, 0) as near, tenants.client(key, 1) as far, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda place: ask((near, far)[place % 2], max_tokens=1), range(100)))
    codes = [answer.status_code for answer in answers]
    while codes[-1] != 429 or 503 in codes:  # a machine under load; what timed out is given back
        eventually(lambda: books.is_at_rest, 30)
        codes = [code for code in codes if code != 503] + [tenants.chat(key, max_tokens=1).status_code]
    assert set(codes) == {200, 429} and codes.count(200) == 25
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert error(refused) == (429, "requests", "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    eventually(lambda: books.is_at_rest)


def test_what_is_told_is_what_is_left(tenants: Tenants, books):
    project = tenants.project(limits={"tokens_per_minute": 600})
    _, _, key = tenants.key(project, limits={"requests_per_minute": 3, "tokens_per_minute": 10_000})
    first = tenants.chat(key, max_tokens=4)
    used = first.json()["usage"]["prompt_tokens"]
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert first.headers["x-ratelimit-reset-requests"] == "20s"
    assert first.headers["x-ratelimit-limit-tokens"] == first.headers["x-ratelimit-limit-project-tokens"] == "600"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 600 - used - 4
    assert first.headers["x-ratelimit-reset-tokens"] == first.headers["x-ratelimit-reset-project-tokens"]
    assert tenants.chat(key).status_code == tenants.chat(key).status_code == 200
    refused = tenants.chat(key)
    assert error(refused) == (429, "requests", "rate_limit_exceeded")
    wait = int(refused.headers["retry-after-ms"])
    assert 15_000 < wait <= 20_000 and int(refused.headers["retry-after"]) == -(-wait // 1000)
    assert "Limit 3" in refused.json()["error"]["message"]
    eventually(lambda: books.is_at_rest)


def test_the_headers_come_with_streams_too(tenants: Tenants):
    _, _, key = tenants.key(limits={"requests_per_minute": 3})
    with (
        tenants.client(key) as client,
        client.stream(
            "POST", CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
        ) as answer,
    ):
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert "[DONE]" in answer.read().decode()


def test_tokens_are_reserved_whole_and_settled_to_what_was_used(tenants: Tenants, books, engine):
    _, _, key = tenants.key(limits={"tokens_per_day": 300})
    engine.answer = "ab"  # three tokens with the end
    reserved = tenants.chat(key, max_tokens=200)
    assert (
        int(reserved.headers["x-ratelimit-remaining-tokens"]) == 300 - reserved.json()["usage"]["prompt_tokens"] - 200
    )
    used = 300 - reserved.json()["usage"]["total_tokens"]
    second = tenants.chat(key, max_tokens=200)  # at once: the first has given back what it did not use
    assert second.status_code == 200, second.text
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == used - second.json()["usage"]["prompt_tokens"] - 200
    large = tenants.chat(key, max_tokens=299)
    assert error(large) == (429, "tokens", "rate_limit_exceeded") and large.headers["x-should-retry"] == "false"
    eventually(lambda: books.is_at_rest)


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_refusal_names_what_was_asked_of_the_limit_that_refuses(tenants: Tenants, kind):
    _, _, key = tenants.key(limits={f"{kind}_tokens_per_day": 4})
    free = tenants.chat(tenants.key()[2], max_tokens=1).json()["usage"]["prompt_tokens"]
    large = tenants.chat(key, max_tokens=37)
    assert error(large) == (429, "tokens", "rate_limit_exceeded")
    assert f"Limit 4, Requested {37 if kind == 'output' else free}." in large.json()["error"]["message"]


def test_what_was_not_asked_for_is_cut_to_what_a_limit_could_ever_give(tenants: Tenants, books, engine):
    _, _, key = tenants.key(limits={"tokens_per_day": 60})
    engine.answer = "x" * 100
    with tenants.client(key) as client:
        answer = client.post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["total_tokens"] == 60
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_max_tokens_has_a_cap(tenants: Tenants):
    _, _, key = tenants.key(limits={"models": {"tiny": {"max_tokens": 7}}})
    refused = tenants.chat(key, max_tokens=8)
    assert error(refused) == (400, "invalid_request_error", "integer_above_max_value")
    assert refused.json()["error"]["param"] == "max_tokens"
    with tenants.client(key) as client:
        answer = client.post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    assert answer.json()["usage"]["completion_tokens"] == 7


def test_a_place_is_free_when_its_request_has_ended(tenants: Tenants, books, engine):
    _, _, key = tenants.key(limits={"concurrent_requests": 2})
    engine.pace = 0.02
    with tenants.client(key, 0) as near, tenants.client(key, 1) as far, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda place: ask((near, far)[place % 2], max_tokens=20), range(6)))
    codes = [answer.status_code for answer in answers]
    assert (codes.count(200), codes.count(429)) == (2, 4), codes
    assert error(next(a for a in answers if a.status_code == 429)) == (429, "requests", "rate_limit_exceeded")
    engine.pace = 0.0
    for place in range(6):  # one after the other, at either gateway, with nothing between them
        assert tenants.chat(key, place % 2).status_code == 200
    eventually(lambda: books.is_at_rest)


def test_several_choices_are_one_request_and_one_prompt(tenants: Tenants, books):
    project, _, key = tenants.key(limits={"requests_per_minute": 10, "tokens_per_minute": 1000})
    answer = tenants.chat(key, n=3, max_tokens=4)
    assert answer.headers["x-ratelimit-remaining-requests"] == "9"
    usage = answer.json()["usage"]
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 1000 - usage["prompt_tokens"] - 12
    eventually(lambda: books.is_at_rest)
    entries = books.ledger(project)
    assert len(entries) == 3
    assert sum(int(e["prompt"]) for e in entries) == usage["prompt_tokens"]
    assert sum(int(e["output"]) for e in entries) == usage["completion_tokens"]


def test_limits_of_the_organization_hold_for_all_its_keys(tenants: Tenants, books):
    keys = [tenants.key()[2] for _ in range(2)]
    tenants.post("/organization", {"limits": {"models": {"tiny": {"requests_per_day": 3}}}})
    try:
        codes = [tenants.chat(keys[place % 2]).status_code for place in range(5)]
    finally:
        tenants.post("/organization", {"limits": {}})
    assert codes == [200, 200, 200, 429, 429]
    assert tenants.chat(keys[0]).status_code == 200  # a changed limit holds at once


def test_a_revoked_key_of_a_limited_project_is_of_no_use_at_once(tenants: Tenants):
    project = tenants.project(limits={"requests_per_minute": 1000})
    _, key_id, key = tenants.key(project)
    with tenants.client(key, 1) as client:
        assert ask(client).status_code == 200
        tenants.admin.delete(f"/v1/organization/projects/{project}/api_keys/{key_id}")
        assert ask(client).status_code == 401


def test_tiers_and_models_are_checked(tenants: Tenants):
    _, _, key = tenants.key(tenants.project(service_tiers=["flex"], models=["other", "tiny-alias"]))
    assert tenants.chat(key, service_tier="flex").status_code == 200
    refused = tenants.chat(key, service_tier="priority")
    assert error(refused) == (403, "invalid_request_error", "service_tier_not_allowed")
    _, _, key = tenants.key(models=["other"])
    refused = tenants.chat(key)
    assert error(refused) == (403, "invalid_request_error", "model_not_found")


def test_clients_that_hang_up_give_back(tenants: Tenants, books, engine):
    project, _, key = tenants.key(limits={"tokens_per_day": 5000, "concurrent_requests": 5})
    engine.pace = 0.02
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "stream": True}
    with tenants.client(key) as client, client.stream("POST", CHAT, json={**body, "ignore_eos": True}) as answer:
        seen = 0
        for line in answer.iter_lines():
            seen += line.startswith("data: ")
            if seen == 4:
                break
    eventually(lambda: books.is_at_rest)
    (entry,) = books.ledger(project)
    assert entry["reason"] == "cancelled" and 2 <= int(entry["output"]) < 30


def test_what_a_dead_gateway_reserved_comes_back(tenants: Tenants, books, monkeypatch):
    """A gateway that dies between its reservation and the queue: what it leaves is a reservation and nothing else."""
    _, _, key = tenants.key(limits={"tokens_per_day": 5000, "requests_per_day": 5, "concurrent_requests": 1})
    tenancy = tenants.gateway.app.state.services.tenancy
    monkeypatch.setattr("noria.gateway.tenancy.admission.HOLD_MS", 300)
    origin = "noria.gateway.origin.Queued._enqueue"

    async def dies(self, request):
        raise EngineFault("killed")

    async def no_withdrawal(*_):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(origin, dies)
        patch.setattr(tenancy.books, "withdraw", no_withdrawal)
        assert tenants.chat(key).status_code == 500
        assert books.held()
    eventually(lambda: books.is_at_rest)
    answer = tenants.chat(key)
    assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == "4"


def create(client: openai.OpenAI, **fields: object) -> object:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}
    return client.chat.completions.create(**asked)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("limits", "max_tokens", "kind"),
    [({"requests_per_minute": 20}, 1, "requests"), ({"tokens_per_minute": 6000}, 400, "tokens")],
)
def test_the_sdk_s_own_retry_gets_in_as_soon_as_it_may(
    tenants: Tenants, books, engine, monkeypatch, limits, max_tokens, kind
):
    """It waits for as long as it was told, without jitter, and its first retry is let in."""
    _, _, key = tenants.key(limits=limits)
    engine.answer = "y" * 450
    client = openai.OpenAI(base_url=f"{tenants.gateway.url}/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.RateLimitError) as refused:
        while True:
            asked = time.monotonic()
            create(client, max_tokens=max_tokens)
    told = int(refused.value.response.headers["retry-after-ms"]) / 1000
    due = asked + told, time.monotonic() + told  # the store said it in between
    assert (refused.value.type, refused.value.code) == (kind, "rate_limit_exceeded")
    slept, sleep = [], time.sleep

    def noted(seconds: float) -> None:
        slept.append((time.monotonic(), seconds))
        sleep(seconds)

    again = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr("openai._base_client.time.sleep", noted)
        create(client.with_options(max_retries=3), max_tokens=max_tokens)
    ((since, wait),) = [(at, seconds) for at, seconds in slept if seconds > 0.1]
    assert due[0] - 0.01 <= since + wait and again + wait <= due[1] + 0.1 * told, (due, again, since, wait)


def test_the_sdk_does_not_retry_what_is_of_no_use(tenants: Tenants, monkeypatch):
    """Neither a budget that is used up, nor what a limit would let in after more time than the SDK waits."""
    _, _, spent = tenants.key(budgets=[{"period": "day", "unit": "tokens", "limit": 1}])
    _, _, slow = tenants.key(limits={"requests_per_day": 1})
    assert tenants.chat(slow).status_code == 200
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits for {seconds} s to try again"))
    for key, kind, code in ((spent,) + ("insufficient_quota",) * 2, (slow, "requests", "rate_limit_exceeded")):
        client = openai.OpenAI(base_url=f"{tenants.gateway.url}/v1", api_key=key, max_retries=5)
        with pytest.raises(openai.RateLimitError) as refused:
            create(client)
        assert (refused.value.type, refused.value.code) == (kind, code)
    assert "retry-after-ms" in refused.value.response.headers


def test_embeddings_are_limited_and_written_down(tenants: Tenants, books):
    project, _, key = tenants.key(limits={"input_tokens_per_day": 20, "requests_per_day": 9})
    with tenants.client(key) as client:
        answer = client.post("/v1/embeddings", json={"model": "tiny", "input": ["abcd", "efgh"]})
        assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == "8"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "12"
        refused = client.post("/v1/embeddings", json={"model": "tiny", "input": "x" * 16})
    assert error(refused) == (429, "tokens", "rate_limit_exceeded")
    eventually(lambda: books.is_at_rest)
    assert sum(int(entry["prompt"]) for entry in books.ledger(project)) == 8


@pytest.mark.parametrize("of", ["key", "project", "organization", "model"])
def test_waiting_requests_are_bounded(tenants: Tenants, engine, books, of):
    queued = {"queued_requests": 2}
    limits = {"models": {"tiny": queued}} if of == "model" else queued
    project = tenants.project(limits=limits if of in ("project", "model") else {})
    _, _, key = tenants.key(project, limits=limits if of == "key" else {})
    other = tenants.key(None if of == "organization" else project)[2] if of != "key" else key
    endless = {"ignore_eos": True, "max_tokens": 60}
    engine.pace = 0.2
    with (
        tenants.gateway.client("sk-static") as busy,
        tenants.client(key, 0) as near,
        tenants.client(other, 1) as far,
        ThreadPoolExecutor(2 * NUM_PLACES + 8) as pool,
    ):
        if of == "organization":
            tenants.post("/organization", {"limits": limits})
        try:
            full = [pool.submit(ask, busy, **endless) for _ in range(NUM_PLACES)]
            eventually(lambda: len(engine.running) == NUM_PLACES)
            answers = list(pool.map(lambda place: pool.submit(ask, (near, far)[place % 2]), range(8)))
            eventually(lambda: sum(answer.done() for answer in answers) >= 6)  # two wait, the others are refused
            refused = [answer.result() for answer in answers if answer.done()]
            assert [error(answer) for answer in refused] == [(429, "requests", "rate_limit_exceeded")] * 6
            assert "queued requests: Limit 2" in refused[0].json()["error"]["message"]
            engine.pace = 0.0
            assert sum(answer.result().status_code == 200 for answer in (*answers, *full)) == 2 + NUM_PLACES
            engine.pace = 0.1  # these run long, and are taken up at once: so none of them waits for long
            for _ in range(4):
                full.append(pool.submit(ask, near, **endless))
                eventually(lambda: len(engine.running) == len(full) - NUM_PLACES)
            engine.pace = 0.0
            assert [answer.result().status_code for answer in full[NUM_PLACES:]] == [200] * 4
        finally:
            engine.pace = 0.0
            if of == "organization":
                tenants.post("/organization", {"limits": {}})
    eventually(lambda: books.is_at_rest)


def test_with_the_limits_out_of_reach_nobody_comes_in(tenants: Tenants, monkeypatch):
    _, _, key = tenants.key(limits={"requests_per_minute": 5})
    services = tenants.gateway.app.state.services

    async def away(*_):
        raise BrokerUnavailable("away")

    monkeypatch.setattr(services.tenancy.books, "admit", away)
    assert tenants.chat(key).status_code == 503
    monkeypatch.setattr(services.tenancy, "_options", type(services.tenancy._options)(fail_open=True))
    assert tenants.chat(key).status_code == 200
    with tenants.gateway.client(None) as client:
        metrics = client.get("/metrics").text
    assert 'noria_gateway_limits_unavailable_total{outcome="refused"} 1.0' in metrics
    assert 'noria_gateway_limits_unavailable_total{outcome="admitted"} 1.0' in metrics


def test_budgets_stop_mid_stream_and_are_never_overrun(tenants: Tenants, books, engine):
    project = tenants.project(budgets=[{"period": "day", "unit": "tokens", "limit": 100, "soft": 0.5}])
    _, _, key = tenants.key(project)
    engine.answer = "y" * 300
    with tenants.client(key) as client:
        first = ask(client, max_tokens=300)
        assert first.status_code == 200 and first.json()["choices"][0]["finish_reason"] == "length"
        assert first.json()["usage"]["total_tokens"] == 100
        assert first.headers["x-noria-granted-tokens"] == str(first.json()["usage"]["completion_tokens"])
        eventually(lambda: books.is_at_rest)
        second = ask(client, max_tokens=1)
    assert error(second) == (429, "insufficient_quota", "insufficient_quota")
    assert second.headers["x-should-retry"] == "false" and "retry-after" not in second.headers
    events = [e["type"] for e in tenants.admin.get("/v1/organization/audit_logs").json()["data"][:2]]
    assert sorted(events) == ["budget.exhausted", "budget.threshold"]


def test_budgets_in_money_follow_the_price_list(tenants: Tenants, books, engine):
    tenants.post("/organization/prices/tiny", {"input": 1.0, "output": 100.0})
    try:
        time.sleep(1.1)  # prices are known for a second
        project = tenants.project(budgets=[{"period": "month", "unit": "usd", "limit": 0.005}])
        _, _, key = tenants.key(project)
        engine.answer = "y" * 300
        answer = tenants.chat(key, max_tokens=300)
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == int((0.005 - usage["prompt_tokens"] / 1e6) / 100e-6)
        eventually(lambda: books.is_at_rest)
        (entry,) = books.ledger(project)
        assert int(entry["cost"]) == usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 100_000
    finally:
        tenants.admin.delete("/v1/organization/prices/tiny")


def test_no_key_is_found_anywhere(tenants: Tenants, books, capfd):
    project, key_id, key = tenants.key(limits={"requests_per_minute": 1})
    rotated = tenants.post(f"/organization/projects/{project}/api_keys/{key_id}/rotate", {"grace_seconds": 5})["value"]
    said = [tenants.chat(k, place).text for k in (key, rotated, key[:-1] + "x") for place in (0, 1)]
    for place in (0, 1):
        with httpx.Client(base_url=tenants.gateways[place].url) as client:
            said.append(client.get("/metrics").text)
    said += capfd.readouterr()
    for name in books.client.scan_iter("*"):
        said.append(name)
        said.append(str(books.client.execute_command("DUMP", name, NEVER_DECODE=True)))
    everything = "\n".join(said)
    for secret in (key, rotated, tenants.admin_key):
        assert secret not in everything and secret[13:-4] not in everything
