"""Fifty at once over two gateways, at the very edge of a limit, hanging up and failing; keys revoked in mid-stream."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.gateway.conftest import eventually
from tests.gateway.tenancy.books import Store
from tests.gateway.tenancy.conftest import CHAT, Tenants, ask

CROWD = 50


@pytest.fixture
def books(store_url):
    return Store(store_url)


def let_in(found: Counter[int], number: int) -> bool:
    """Exactly so many; fewer only where a busy machine kept the store from answering in time."""
    return set(found) <= {200, 429, 503} and found[200] + min(found[503], number) >= number >= found[200]


def crowd(tenants: Tenants, key: str, do: Callable[[httpx.Client, int], int]) -> Counter[int]:
    """What came of fifty at once, by status."""
    with tenants.client(key, 0) as near, tenants.client(key, 1) as far, ThreadPoolExecutor(CROWD) as pool:
        return Counter(pool.map(lambda place: do((near, far)[place % 2], place), range(CROWD)))


def streamed(client: httpx.Client, *, events: int, **fields: object) -> int:
    """The status; the connection is dropped after so many events."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    with client.stream("POST", CHAT, json=body) as answer:
        for line in answer.iter_lines():
            events -= line.startswith("data: ")
            if not events:
                break
        return answer.status_code


def test_tokens_that_are_there_for_ten_let_ten_in(tenants: Tenants, books, engine):
    used = tenants.chat(tenants.key()[2], max_tokens=4, ignore_eos=True).json()["usage"]["total_tokens"]
    project, _, key = tenants.key(limits={"tokens_per_day": 10 * used})
    found = crowd(tenants, key, lambda client, _: ask(client, max_tokens=4, ignore_eos=True).status_code)
    assert let_in(found, 10), found
    eventually(lambda: books.is_at_rest)
    assert sum(int(e["prompt"]) + int(e["output"]) for e in books.ledger(project)) <= 10 * used


def test_places_are_never_more_than_there_are_and_all_come_back(tenants: Tenants, books, engine):
    """A third of them hangs up in mid-stream; of the second crowd the engine fails all."""
    _, _, key = tenants.key(limits={"concurrent_requests": 5})
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.001):
            most = max(most, len(engine.running))

    def one(client: httpx.Client, place: int) -> int:
        fields = {"max_tokens": random.randint(1, 12), "ignore_eos": True}
        return streamed(client, events=2, **fields) if place % 3 == 0 else ask(client, **fields).status_code

    watching = threading.Thread(target=watch)
    watching.start()
    engine.pace = 0.005
    try:
        for fails in (False, True):
            engine.fail_with = "the model broke" if fails else None
            found = crowd(tenants, key, one)
            assert found[429] and found[500 if fails else 200] and set(found) <= {200, 429, 500, 503}
    finally:
        engine.fail_with, engine.pace = None, 0.0
        over.set()
        watching.join()
    assert 0 < most <= 5
    eventually(lambda: books.is_at_rest)
    engine.pace = 0.1
    found = crowd(tenants, key, lambda client, _: ask(client, max_tokens=20, ignore_eos=True).status_code)
    engine.pace = 0.0
    assert let_in(found, 5), found
    eventually(lambda: books.is_at_rest)


def test_what_ended_early_is_given_back_to_the_token(tenants: Tenants, books, engine):
    """Hung up, failed, stopped and whole: what is left of the limit is what the ledger does not name."""
    limit = 20_000
    project, _, key = tenants.key(limits={"tokens_per_day": limit, "requests_per_day": 1000})
    engine.pace = 0.003

    def one(client: httpx.Client, place: int) -> int:
        if place % 3 == 0:
            return streamed(client, events=3, max_tokens=60, ignore_eos=True)
        return ask(client, max_tokens=60, **({"stop": "w"} if place % 3 == 1 else {})).status_code

    assert crowd(tenants, key, one) == {200: CROWD}
    engine.fail_with = "the model broke"
    assert crowd(tenants, key, lambda client, _: ask(client, max_tokens=60).status_code) == {500: CROWD}
    engine.fail_with, engine.pace = None, 0.0
    eventually(lambda: books.is_at_rest)
    used = sum(int(entry["prompt"]) + int(entry["output"]) for entry in books.ledger(project))
    answer = tenants.chat(key, max_tokens=1)
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    refilled = 30 * limit / 86_400  # what half a minute brings back
    assert 0 <= left - (limit - used - answer.json()["usage"]["prompt_tokens"] - 1) <= refilled
    assert int(answer.headers["x-ratelimit-remaining-requests"]) in (1000 - 2 * CROWD - 1, 1000 - 2 * CROWD)
    eventually(lambda: books.is_at_rest)


@pytest.mark.parametrize("limits", [{}, {"concurrent_requests": 3, "tokens_per_day": 5000}], ids=["free", "limited"])
def test_a_key_revoked_in_mid_stream_ends_its_stream_and_opens_nothing_more(tenants: Tenants, books, engine, limits):
    project, key_id, key = tenants.key(limits=limits)
    engine.pace = 0.02
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    with tenants.client(key) as client, client.stream("POST", CHAT, json=body) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        gone = tenants.admin.delete(f"/v1/organization/projects/{project}/api_keys/{key_id}")
        assert gone.status_code == 200
        for place in range(2):
            eventually(lambda place=place: tenants.chat(key, place).status_code == 401, 2)
        *_, usage, done = lines
    engine.pace = 0.0
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 40
    eventually(lambda: books.is_at_rest)
    # One more may have come in within the half second for which a gateway knows a key.
    whole = [entry for entry in books.ledger(project) if entry["output"] == "40"]
    assert [(entry["key"], entry["reason"]) for entry in whole] == [(key_id, "length")]
