"""`make audit` against a database of vulnerabilities of our own: found, clean, and not there."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.gateway.conftest import free_port

SCRIPT = Path(__file__).parents[1] / "deploy" / "audit.py"
pytest.importorskip("pip_audit", reason="pip-audit is not installed")


class Osv(BaseHTTPRequestHandler):
    """Knows one fault, of jinja2 before 3.1.6."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        faulty = asked["package"]["name"] == "jinja2" and asked["version"] == "3.1.5"
        fault = {
            "id": "GHSA-0000-0000-0000",
            "aliases": [],
            "details": "a fault",
            "affected": [
                {
                    "package": {"name": "jinja2", "ecosystem": "PyPI"},
                    "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.6"}]}],
                }
            ],
        }
        body = json.dumps({"vulns": [fault]} if faulty else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def osv() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Osv)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/query"
    server.shutdown()
    server.server_close()


def audit(tmp_path: Path, url: str, *packages: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "packages").write_text("\n".join(packages))
    command = [sys.executable, str(SCRIPT), "--no-deps", "--disable-pip", "-r", str(tmp_path / "packages")]
    return subprocess.run(command, env=os.environ | {"OSV_URL": url}, capture_output=True, text=True)


def test_what_is_known_is_named_with_its_cure(tmp_path: Path, osv: str) -> None:
    done = audit(tmp_path, osv, "jinja2==3.1.5", "redis==5.2.0")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "jinja2 3.1.5: GHSA-0000-0000-0000, mended in 3.1.6",
        "dependencies: 1 known vulnerabilities in 2 packages",
    ]


def test_where_nobody_can_be_asked_that_is_said(tmp_path: Path) -> None:
    silent = audit(tmp_path, f"http://127.0.0.1:{free_port()}/v1/query", "redis==5.2.0")
    assert silent.returncode == 0 and not silent.stdout
    assert silent.stderr.startswith("dependencies: could not look (") and "refused" in silent.stderr


def test_a_release_wants_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    program = runpy.run_path(str(SCRIPT))
    program["main"].__globals__["ask"] = lambda _: (None, "nobody")
    assert program["main"]([]) == 0
    monkeypatch.setenv("AUDIT_MUST_LOOK", "1")
    assert program["main"]([]) == 1
    program["main"].__globals__["ask"] = lambda _: ([{"name": "redis", "version": "5", "vulns": []}], "")
    assert program["main"]([]) == 0
