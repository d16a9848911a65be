"""Batches through cancellation, expiry, refusals, drain and death: every line has exactly one result.

Each test has gateways of its own: none that is not in it runs its batch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.gateway.batching import create, finished, line, results, state


@pytest.mark.parametrize(
    ("lines", "code"),
    [(b"\n", "empty_file"), ([line("a", model="none")], "model_not_found"), (b'"' + b"x" * 99_999, "invalid_request")],
)
def test_other_inputs_that_cannot_run(launch, store_url, engine, lines, code):
    with launch.gateway(store_url, max_body_bytes=50_000).client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        done = finished(client, create(client, lines))
        assert (done["status"], [fault["code"] for fault in done["errors"]["data"]]) == ("failed", [code])


def test_a_cancelled_batch_keeps_what_is_done(launch, store_url, engine, monkeypatch):
    monkeypatch.setattr("noria.gateway.batches.run.PATIENCE", 0.5)
    engine.pace = 0.02
    with launch.gateway(store_url, batch_concurrency=4, resume_window=0.5).client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        lines = [line(f"id-{n}", max_tokens=8) for n in range(12)]
        lines += [line(f"slow-{n}", max_tokens=400, ignore_eos=True) for n in range(12)]
        batch = create(client, lines)
        launch.eventually(lambda: state(client, batch)["request_counts"]["completed"] >= 8)
        assert client.delete(f"/v1/files/{batch['input_file_id']}").json()["error"]["code"] == "file_in_use"
        for _ in range(2):
            assert client.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
        done = finished(client, batch)
        assert done["status"] == "cancelled" and done["cancelling_at"] <= done["cancelled_at"]
        output, errors = results(client, done)
        assert set(output) | set(errors) == {given["custom_id"] for given in lines} and len(output) >= 8
        assert {result["error"]["code"] for result in errors.values()} == {"batch_cancelled"}
        assert done["request_counts"] == {"total": 24, "completed": len(output), "failed": len(errors)}
        refused = client.post(f"/v1/batches/{batch['id']}/cancel")
        assert refused.status_code == 409 and "'cancelled'" in refused.json()["error"]["message"]
        launch.eventually(lambda: not engine.running)  # what ran for it has been cancelled as well
        assert client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200


def test_what_is_not_done_in_time_is_told_so(launch, store_url, engine, monkeypatch):
    monkeypatch.setattr("noria.gateway.batches.run.PATIENCE", 0.1)
    monkeypatch.setattr("noria.gateway.schemas.batches.WINDOW", 2)
    engine.pace = 0.02
    with launch.gateway(store_url, batch_concurrency=4, resume_window=0.5).client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        lines = [line(f"id-{n}") for n in range(4)]
        lines += [line(f"slow-{n}", max_tokens=400, ignore_eos=True) for n in range(6)]
        done = finished(client, create(client, lines))
        assert done["status"] == "expired" and done["expired_at"] >= done["finalizing_at"]
        output, errors = results(client, done)
        assert set(output) == {f"id-{n}" for n in range(4)} and set(errors) == {f"slow-{n}" for n in range(6)}
        assert {result["error"]["code"] for result in errors.values()} == {"batch_expired"}


def test_a_full_queue_is_waited_out(launch, store_url, engine, monkeypatch):
    monkeypatch.setattr("noria.gateway.batches.attempts._PAUSES", (0.05, 0.2))
    monkeypatch.setattr("noria.gateway.errors.Overloaded.headers", lambda self: {})
    engine.pace = 0.005
    with launch.gateway(store_url, batch_concurrency=30, max_queued_per_tenant=2).client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        done = finished(client, create(client, [line(f"id-{n}") for n in range(60)]))
        assert done["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        assert len(results(client, done)[0]) == 60
        refused = [
            text for text in client.get("/metrics").text.splitlines() if 'chat_completions",status="429"' in text
        ]
        assert refused  # it was full indeed


def test_a_gateway_that_drains_hands_its_batches_on(launch, store_url, engine):
    engine.pace = 0.02
    first, second = (launch.gateway(store_url, batch_concurrency=n) for n in (4, 0))
    with first.client() as client, second.client() as other:
        for gateway in (client, other):
            launch.eventually(lambda c=gateway: c.get("/readyz").status_code == 200)
        batch = create(client, [line(f"id-{n}", max_tokens=12) for n in range(24)])
        launch.eventually(lambda: state(other, batch)["request_counts"]["completed"] >= 4)
        first.app.state.services.drain.begun = True
        launch.eventually(lambda: first.app.state.services.drain.open == 0, 6)
        third = launch.gateway(store_url)
        done = finished(other, batch)
        assert done["request_counts"] == {"total": 24, "completed": 24, "failed": 0}
        assert len(results(other, done)[0]) == 24
        assert len(engine.seen) == 24  # half-run lines were attached to
        assert "noria_gateway_batches_running 0.0" in httpx.get(f"{third.url}/metrics").text


def test_chaos_the_gateway_dies_in_the_middle_and_another_ends_the_batch(launch, store_url, engine, own_port):
    engine.pace = 0.02
    environment = {**os.environ, "NORIA_REDIS_URL": store_url, "NORIA_API_KEY": "sk-test-key"}
    command = [sys.executable, "-m", "noria", "gateway", "--port", str(own_port), "--batch-concurrency", "6"]
    doomed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    survivor = launch.gateway(store_url, batch_concurrency=0)
    try:
        with survivor.client() as client:
            launch.eventually(lambda: client.get("/readyz").status_code == 200)
            batch = create(client, [line(f"id-{n}", max_tokens=16) for n in range(40)] + [line("bad", top_p=2)])
            launch.eventually(lambda: state(client, batch)["request_counts"]["completed"] >= 6, 90)
            # In the middle of some lines, so that the heir has something to attach to.
            launch.eventually(lambda: any(3 <= done <= 8 for _, _, done in list(engine.running.values())))
            doomed.send_signal(signal.SIGKILL)
            doomed.wait(10)
            half = state(client, batch)["request_counts"]
            assert half["completed"] < 40
            heir = launch.gateway(store_url, batch_concurrency=6)
            done = finished(client, batch, 90)
            assert done["status"] == "completed"
            assert done["request_counts"] == {"total": 41, "completed": 40, "failed": 1}
            output, errors = results(client, done)
            assert set(output) == {f"id-{n}" for n in range(40)} and set(errors) == {"bad"}
            assert len(engine.seen) == 40  # no line was run twice, not even those that the dead gateway had begun
            heir.stop()
    finally:
        doomed.kill()
        doomed.wait(10)
