"""A gateway with its figures behind a port of their own."""

from __future__ import annotations

import socket

import httpx
import pytest

from noria.gateway.config import GatewaySettings
from tests.gateway.conftest import free_port
from tests.gateway.test_reload import Process


def test_figures_are_at_their_own_port_and_nowhere_else(
    tmp_path, store_url, engine, own_port, launch, monkeypatch
) -> None:
    apart = free_port()
    monkeypatch.setenv("NORIA_GATEWAY_METRICS_PORT", str(apart))
    running = Process(tmp_path, own_port, store_url)
    try:
        launch.eventually(running.ready, 60)
        assert running.ask().status_code == 200
        refused = running.client.get("/metrics")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "unknown_url"
        with httpx.Client(base_url=f"http://127.0.0.1:{apart}") as watcher:
            figures = watcher.get("/metrics").text
            assert 'noria_gateway_requests_total{endpoint="completions",status="200"} 1.0' in figures
            assert watcher.get("/readyz").status_code == watcher.get("/healthz").status_code == 200
            for path in ("/v1/models", "/dashboard", "/v1/completions", "/"):
                answer = watcher.get(path, headers={"authorization": "Bearer k"})
                assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url", path
    finally:
        running.process.terminate()
        assert running.process.wait(20) == 0


def test_a_port_for_figures_that_is_taken_is_one_clear_line(tmp_path, store_url, own_port, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("NORIA_GATEWAY_METRICS_PORT", str(port))
        running = Process(tmp_path, own_port, store_url)
        assert running.process.wait(60) == 1
    (line,) = running.log_path.read_text().splitlines()
    assert line.startswith(f"noria gateway: cannot listen on 127.0.0.1:{port}")


def test_one_port_cannot_be_both() -> None:
    with pytest.raises(ValueError, match="another one than port"):
        GatewaySettings(port=8000, metrics_port=8000)
    assert GatewaySettings(host="0.0.0.0", metrics_port=9100).doors == (("0.0.0.0", 8000), ("0.0.0.0", 9100))
