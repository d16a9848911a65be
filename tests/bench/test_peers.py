"""The comparison with other servers: what is left to measure, what counts as ahead, what is said of who is missing."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers.__main__ import main, todo
from bench.peers.catalogue import PEERS, Launch, Peer
from bench.peers.environments import Absent, prepare
from bench.peers.measures import MEASURES, Measure, run, words
from bench.peers.report import ahead, of
from bench.peers.running import Failed, Running, free_port
from noria.load import Target
from noria.replay import Workload

SPEED, PROMPT = MEASURES[0], MEASURES[3]
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send(b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        sum(range(2_000_000))  # CPU time that must be seen
        last = {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage}
        self.send(b"data: " * bool(body.get("stream")) + json.dumps(last).encode() + b"\\n\\n")  # no [DONE]
    def send(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def kept(**values: float) -> dict[str, Any]:
    runs = [{"round": 0, "measure": SPEED.name, "peer": peer, "value": value} for peer, value in values.items()]
    peers = {peer: {"what": peer, "start_seconds": [1.0], "memory_mib": [2.0]} for peer in values}
    return {"peers": peers, "absent": {"openvino": "no such package"}, "runs": runs}


def test_what_is_measured_is_not_measured_again_and_each_peer_begins_in_turn() -> None:
    left = list(todo(kept(noria=1.0), ["noria", "llamacpp"], 2))
    assert len(left) == 2 * len(MEASURES) * 2 - 1
    assert (left[0][0], left[0][1].name, left[0][2]) == (0, SPEED.name, "llamacpp")
    firsts = [peer for (_, measure, peer), before in zip(left[1:], left, strict=False) if measure is not before[1]]
    assert set(firsts) == {"noria", "llamacpp"}


def test_ahead_is_above_one_where_less_is_better_too() -> None:
    assert ahead(SPEED, 90.0, 45.0) == 2.0 and ahead(PROMPT, 0.5, 1.0) == 2.0
    runs = [{"measure": SPEED.name, "peer": "noria", "value": value} for value in (3.0, 1.0, 9.0)]
    assert of([*runs, {"measure": SPEED.name, "peer": "noria", "failed": 1}], "noria", SPEED) == 3.0
    assert of(runs, "llamacpp", SPEED) is None


def test_the_table_shows_ratios_failures_and_who_is_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = kept(noria=90.0, llamacpp=60.0)
    state["runs"].append({"round": 0, "measure": PROMPT.name, "peer": "llamacpp", "failed": 3, "errors": ["it broke"]})
    (tmp_path / "peers.json").write_text(json.dumps(state))
    assert main(["--show", "--folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "60 (1.50x)" in shown and "failed" in shown and "absent: no such package" in shown
    assert json.loads((tmp_path / "peers.json").read_text()) == state


def test_a_server_is_asked_and_its_cpu_time_is_read(tmp_path: Path) -> None:
    """One that sends no [DONE]: the reason for which its answer ended is enough."""
    port = free_port()
    server = Running([sys.executable, "-c", SERVER, str(port)], port, "/", {}, tmp_path / "log")
    try:
        target = Target(f"http://127.0.0.1:{port}/v1", "theirs", chat=False)
        measure = Measure("two", Workload(4, (10, 10), (5, 5)), 2, lambda f: f["tokens_per_second"], "tokens/s")
        found = asyncio.run(run(measure, target, asyncio.run(words(target)), server))
        assert found["value"] > 0 and found["prompt_tokens"] == 10 and found["tokens_of_asked"] == 1.0
        assert found["cpu_ms_per_token"] > 1 and server.memory() > 2**20 and server.start_seconds > 0
    finally:
        server.stop()
    server.stop()  # twice does no harm
    assert server.cpu_seconds() == 0 and server.memory() == 0
    with pytest.raises(Failed, match="no such file"):
        Running([sys.executable, "-c", "raise SystemExit('no such file')"], port, "/", {}, tmp_path / "log")


def test_who_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho '  no solution found for theirs' >&2; exit 1\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    peer = Peer("theirs", "", lambda launch: [], lambda launch: "", "theirs", ("theirs",))
    with pytest.raises(Absent, match=r"uv venv failed \(no solution found for theirs\)"):
        prepare(peer, tmp_path)
    assert not (tmp_path / "theirs" / "installed.json").exists()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_command_names_port_threads_and_weights(peer: Peer) -> None:
    launch = Launch(Path("/env/bin/python"), Path("/models"), Path("/state"), 4321, 7)
    command = " ".join(peer.command(launch))
    assert "4321" in command and peer.model(launch)
    assert "7" in command or peer.name == "transformers"  # which is told by OMP_NUM_THREADS alone
    assert not peer.needs or f"/models/{peer.needs[-1]}" in command
