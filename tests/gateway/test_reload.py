"""SIGHUP to a real gateway: what can change does, what cannot is named, and a broken file changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from noria.gateway.config import GatewaySettings
from noria.gateway.reload import LiveSettings


class Process:
    """A gateway with a configuration file and a file of keys, and what it has logged."""

    def __init__(self, folder: Path, port: int, store_url: str) -> None:
        self.config, self.keys, self.log_path = folder / "noria.toml", folder / "keys", folder / "log"
        self.configure('aliases = "gpt-4o=tiny"\nmax_stop_strings = 2\n')
        self.keys.write_text("k")
        env = os.environ | {
            "NORIA_REDIS_URL": store_url,
            "NORIA_API_KEY_FILE": str(self.keys),
            "NORIA_GATEWAY_LOG_FORMAT": "json",
        }
        argv = [sys.executable, "-m", "noria", "gateway", f"--port={port}", f"--config={self.config}"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(argv, env=env, stderr=log)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)

    def configure(self, text: str) -> None:
        self.config.write_text(f"[gateway]\n{text}")

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines() if line.startswith("{")]

    def said(self, event: str) -> list[dict[str, object]]:
        return [line for line in self.lines() if line["event"] == event]

    def ask(self, model: str = "tiny", key: str = "k", **fields: object) -> httpx.Response:
        body = {"model": model, "prompt": "a", "max_tokens": 2, **fields}
        return self.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    def ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def gateway(tmp_path: Path, own_port: int, store_url: str, engine: object, launch: object) -> Iterator[Process]:
    running = Process(tmp_path, own_port, store_url)
    try:
        launch.eventually(running.ready, 60)  # type: ignore[attr-defined]
        yield running
    finally:
        running.process.terminate()
        assert running.process.wait(20) == 0


@pytest.fixture
def hangup(gateway: Process, launch: object) -> Callable[[str], dict[str, object]]:
    """Ask for a reload; returns the line that says what came of it."""

    def ask(event: str) -> dict[str, object]:
        before = len(gateway.said(event))
        gateway.process.send_signal(signal.SIGHUP)
        launch.eventually(lambda: len(gateway.said(event)) > before)  # type: ignore[attr-defined]
        return gateway.said(event)[-1]

    return ask


def test_what_can_change_does_and_what_cannot_is_named(gateway, hangup, launch):
    assert gateway.ask("gpt-4o").json()["model"] == "tiny" and gateway.ask("gpt-5").status_code == 404
    assert gateway.ask(stop=["1", "2", "3"]).status_code == 400
    gateway.configure('aliases = "gpt-5=tiny"\nmax_stop_strings = 3\nlog_level = "warning"\nkeep_alive = 5\n')
    gateway.keys.write_text("k,new")
    gateway.process.send_signal(signal.SIGHUP)
    waiting = "settings that take effect at the next start"
    launch.eventually(lambda: gateway.said(waiting))
    assert gateway.said(waiting)[-1]["settings"] == ["keep_alive"]
    launch.eventually(lambda: gateway.ask("gpt-5", key="new").status_code == 200)
    assert gateway.ask("gpt-4o").status_code == 404
    assert gateway.ask(stop=["1", "2", "3"]).status_code == 200
    assert "settings read again" not in {line["event"] for line in gateway.lines()}  # below the new log level
    gateway.configure('log_level = "info"\n')
    assert set(hangup("settings read again")["changed"]) == {"aliases", "max_stop_strings", "log_level"}
    assert "new" not in {str(value) for line in gateway.lines() for value in line.values()}


def test_a_broken_file_changes_nothing_and_says_why(gateway, hangup):
    unusable = "settings cannot be used; nothing has changed"
    gateway.configure("max_stop_strings = 0\n")
    gateway.keys.write_text("new")
    assert "[gateway] max_stop_strings" in hangup(unusable)["reason"]
    gateway.configure("max_stop_string = 3\n")
    assert "did you mean max_stop_strings?" in hangup(unusable)["reason"]
    gateway.configure("max_stop_strings = 3\n")
    gateway.keys.write_text("")
    assert "everybody would be let in" in hangup(unusable)["reason"]
    assert gateway.ask(key="k").status_code == 200 and gateway.ask(key="new").status_code == 401
    assert gateway.ask(key="k", stop=["1", "2", "3"]).status_code == 400


def test_watchers_are_told_now_and_of_each_change():
    live, seen = LiveSettings(GatewaySettings(api_key=SecretStr("k"))), []
    live.watch(lambda now: seen.append(now.max_queued))
    live.take(GatewaySettings(api_key=SecretStr("k"), max_queued=5, port=1))
    assert seen == [10_000, 5] and live.now.port == 8000
