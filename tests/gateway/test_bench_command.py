"""`noria bench` as a person runs it: against our gateway, and against servers that are not ours."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from noria.bench import _headers
from tests.gateway.conftest import KEY, RunningGateway, ScriptedEngine


def noria_bench(base_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "noria", "bench", "--base-url", base_url, *arguments]
    environment = {"NORIA_API_KEY": KEY, "PATH": "", "HOME": "/nowhere"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def test_every_load_has_its_figures(gateway: RunningGateway, engine: ScriptedEngine, tmp_path: Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "load.png"
    engine.answer = "token by token"
    done = noria_bench(
        f"{gateway.url}/v1", "--concurrency", "3", "--rate", "50", "--requests", "7", "--prompt", "300", "300",
        "--output", "9", "9", "--json", str(file), "--plot", str(picture),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 at once" in done.stdout and "50 req/s" in done.stdout and picture.read_bytes().startswith(b"\x89PNG")
    figures = json.loads(file.read_text())
    assert figures["model"] == "tiny" and [result["load"] for result in figures["results"]] == ["concurrency", "rate"]
    for result in figures["results"]:
        assert (result["requests"], result["failed"], result["output_tokens"]) == (7, 0, 63)
        assert abs(result["prompt_tokens"] / 7 - 300) < 30  # words are not tokens
        assert 0 < result["time_to_first_token_median"] <= result["latency_median"] <= result["seconds"]
        assert result["tokens_per_second"] == pytest.approx(63 / result["seconds"])
    prompts = [tuple(claimed.request.prompt) for claimed in engine.seen]
    assert len(set(prompts)) == len(prompts)


def test_a_server_that_cannot_do_all_of_it(other_server: Callable[..., str], tmp_path: Path) -> None:
    """It refuses ignore_eos, cuts a stream, ends one with an error and answers one with a status."""
    good = [b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":"b"}]}', b"[DONE]"]
    url = other_server(good, good[:2], [good[0], b'{"error":{"message":"it broke"}}'], None)
    file = tmp_path / "figures.json"
    done = noria_bench(url, "--concurrency", "1", "--requests", "4", "--json", str(file))
    assert done.returncode == 1
    assert "refuses ignore_eos" in done.stderr
    result = json.loads(file.read_text())["results"][0]
    assert (result["requests"], result["failed"], result["output_tokens"]) == (4, 3, 2)
    assert result["errors"] == ["200 it broke", "503 full", "the stream was cut off"]
    assert all(f"failed: {message}" in done.stderr for message in result["errors"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt", "5", "2"], 2, "--prompt 5 2: 0 < shortest <= longest"),
        (["--rate", "nan"], 2, "--rate nan: must be more than 0"),
        ([], 1, "http://127.0.0.1:9/v1 cannot be reached"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str], code: int, message: str) -> None:
    done = noria_bench("http://127.0.0.1:9/v1", *arguments)
    assert done.returncode == code and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_the_kept_key_goes_to_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORIA_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "api-key").write_text("sk-noria-kept\n")
    assert _headers("http://localhost:8000/v1", tmp_path)["Authorization"] == "Bearer sk-noria-kept"
    assert "Authorization" not in _headers("http://127.0.0.1.example.com/v1", tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-told")
    assert _headers("https://example.com/v1", tmp_path)["Authorization"] == "Bearer sk-told"


@pytest.fixture
def other_server() -> Iterator[Callable[..., str]]:
    """A server of OpenAI's API that knows no ignore_eos; streams its scripts in turn, None being a 503."""
    servers: list[ThreadingHTTPServer] = []

    def start(*scripts: list[bytes] | None) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), _handler(list(scripts))))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _handler(scripts: list[list[bytes] | None]) -> type[BaseHTTPRequestHandler]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, b'{"data":[{"id":"theirs"}]}')

        def do_POST(self) -> None:
            body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "ignore_eos" in body:
                self._send(400, b'{"error":{"message":"unknown parameter: ignore_eos"}}')
            elif not body.get("stream"):
                usage = {"prompt_tokens": 3 + len(body["prompt"].split())}
                self._send(200, json.dumps({"usage": usage}).encode())
            elif (script := scripts.pop(0)) is None:
                self._send(503, b'{"error":{"message":"full"}}')
            else:
                self._send(200, b"".join(b"data: " + event + b"\n\n" for event in script))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Quiet."""

    return Answers
