"""Responses without a client: polled, streamed, resumed, cancelled, and seen to their end by another gateway."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from noria.engine.wire.watches import Watches
from noria.gateway.responses import background
from tests.gateway.conftest import Launch, ScriptedEngine, eventually
from tests.gateway.endpoints.test_responses import TEXT, ask, events_of, stream, text_of

SLOW = 0.02  # seconds per token


def get(client: httpx.Client, response_id: str) -> dict[str, Any]:
    return client.get(f"/v1/responses/{response_id}").json()  # type: ignore[no-any-return]


def ended(client: httpx.Client, response_id: str) -> dict[str, Any]:
    eventually(lambda: get(client, response_id)["status"] not in ("queued", "in_progress"))
    return get(client, response_id)


def resume(client: httpx.Client, response_id: str, after: int) -> list[dict[str, Any]]:
    with client.stream("GET", f"/v1/responses/{response_id}?stream=true&starting_after={after}") as response:
        assert response.status_code == 200, response.read()
        return events_of(response)


def test_it_runs_without_a_client_and_is_polled(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.pace = SLOW
    made = ask(client, background=True, metadata={"k": "v"})
    assert made["status"] == "queued" and made["background"] and made["output"] == []
    eventually(lambda: get(client, made["id"])["status"] == "in_progress")
    last = ended(client, made["id"])
    assert last["status"] == "completed" and text_of(last) == TEXT and last["metadata"] == {"k": "v"}
    unlike = ("id", "created_at", "completed_at", "background", "output", "metadata")
    whole = ask(client)
    assert {k: v for k, v in last.items() if k not in unlike} == {k: v for k, v in whole.items() if k not in unlike}
    assert client.get(f"/v1/responses/{made['id']}/input_items").json()["data"][0]["content"][0]["text"] == "hi"


def test_its_stream_outlives_the_client_and_goes_on_behind_any_event(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.pace = SLOW
    body = {"model": "tiny", "input": "hi", "stream": True, "background": True, "stop": "three"}
    seen: list[str] = []
    with client.stream("POST", "/v1/responses", json=body) as response:
        for line in response.iter_lines():
            seen.append(line)
            if '"sequence_number":8' in line:
                break
    assert "response.queued" in "\n".join(seen)
    response_id = next(line for line in seen if "resp_" in line).partition('"id":"')[2].partition('"')[0]
    whole = resume(client, response_id, -1)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["type"] == "response.completed" and whole[-1]["response"] == get(client, response_id)
    assert text_of(whole[-1]["response"]) == TEXT.partition("three")[0]
    eventually(lambda: len(engine.cancelled) == 1)  # the stop string was found without a client
    for after in (3, 8, len(whole) - 2, len(whole) + 5):
        assert resume(client, response_id, after) == whole[after + 1 :]
    cut = [line.removeprefix("data: ") for line in seen if line.startswith("data: ")]
    assert len(cut) == 9


def test_it_is_cancelled(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.pace = 0.05
    made = ask(client, background=True)
    eventually(lambda: engine.running)
    cancelled = client.post(f"/v1/responses/{made['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" and cancelled["id"] == made["id"]
    eventually(lambda: engine.cancelled)
    time.sleep(0.1)
    assert get(client, made["id"]) == cancelled, "what the engine says then changes nothing"
    assert client.post(f"/v1/responses/{made['id']}/cancel").json() == cancelled
    done = ask(client, background=False)
    refused = client.post(f"/v1/responses/{done['id']}/cancel")
    assert refused.status_code == 400 and "synchronous" in refused.json()["error"]["message"]


def test_cancelling_what_has_ended_leaves_it(client: httpx.Client) -> None:
    made = ask(client, background=True)
    last = ended(client, made["id"])
    assert client.post(f"/v1/responses/{made['id']}/cancel").json() == last


def test_deleting_it_frees_the_engine(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.pace = 0.05
    made = ask(client, background=True)
    eventually(lambda: engine.running)
    assert client.delete(f"/v1/responses/{made['id']}").json()["deleted"]
    eventually(lambda: not engine.running)
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_a_failure_is_kept(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.fail_with = "it broke"
    last = ended(client, ask(client, background=True)["id"])
    assert last["status"] == "failed" and last["error"] == {"code": "server_error", "message": "it broke"}
    assert resume(client, last["id"], -1)[-1]["type"] == "response.failed"


def test_nothing_can_be_built_on_it_before_it_ended(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.pace = 0.05
    made = ask(client, background=True)
    early = client.post("/v1/responses", json={"model": "tiny", "input": "x", "previous_response_id": made["id"]})
    assert early.status_code == 400 and early.json()["error"]["param"] == "previous_response_id"
    client.post(f"/v1/responses/{made['id']}/cancel")


def test_a_whole_stream_equals_one_that_is_read_later(client: httpx.Client) -> None:
    fields = {"background": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    live = stream(client, **fields)
    assert resume(client, live[-1]["response"]["id"], -1) == live


@pytest.mark.parametrize("abrupt", [False, True])
def test_another_gateway_sees_it_to_its_end(
    launch: Launch, own_port: int, monkeypatch: pytest.MonkeyPatch, abrupt: bool
) -> None:
    monkeypatch.setattr("noria.gateway.app.HOLD", 1.0)
    monkeypatch.setattr(background, "EVERY", 0.2)
    launch.store(own_port)
    url = f"redis://127.0.0.1:{own_port}/0"
    engine = launch.engine(url)
    engine.pace = 0.05
    first = launch.gateway(url)
    with first.client() as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        made = ask(client, background=True, conversation=conversation, stop="three")
        eventually(lambda: engine.running)
    if abrupt:  # a dead gateway frees nothing

        async def nothing(*_: object) -> None: ...

        monkeypatch.setattr(Watches, "free", nothing)
    first.stop()
    assert engine.running
    second = launch.gateway(url)
    with second.client() as client:
        last = ended(client, made["id"])
        assert last["status"] == "completed" and text_of(last) == TEXT.partition("three")[0]
        items = client.get(f"/v1/conversations/{conversation}/items?order=asc").json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant"]
        assert resume(client, made["id"], -1)[-1]["response"] == last
