"""One `noria serve` with a tiny model, and pages of a real Chromium that looks at it.

Without Chromium these tests are skipped: `make browser` installs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, ViewportSize, expect, sync_playwright
from safetensors.torch import load_file, save_file

from bench.tiny_model import make
from tests.test_end_to_end import Served, serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 15_000  # milliseconds: the machine may be busy


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="session")
def admin_key(served: Served, folder: Path) -> str:
    """The first admin key, made as an operator makes it."""
    command = [sys.executable, "-m", "noria", "keys", "bootstrap", "--state-dir", str(folder / "state")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[Served]:
    model = make(folder / "tiny")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][0] = 0.0  # the end of a sequence is never the likeliest token
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    options = ("--max-model-len", "2048", "--kv-memory", "64MiB", "--threads", "1", str(model))
    with serve(folder / "state", *options) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Gone before other tests begin: while it is there, this thread has a running event loop."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: `make browser` installs it")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's own sandbox refuses root
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield running
        running.close()


@pytest.fixture(scope="module")
def origin(browser: Browser, served: Served) -> str:
    """Asks for the browser first: without one nothing is started."""
    return served.base_url.removesuffix("/v1")


class Watched:
    """A page, and everything about it that nobody should ever see: errors, foreign addresses."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.urls: list[str] = []
        self.faults: list[str] = []
        page.on("request", self._note)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._listen)

    def _note(self, request: Request) -> None:
        self.urls.append(request.url)
        if not request.url.startswith(self.origin):
            self.faults.append(f"asked for {request.url}")

    def _listen(self, message: ConsoleMessage) -> None:
        # Chromium itself tells of every answer that is an error, and some are meant to be.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.faults.append(message.text)


@pytest.fixture
def watched(browser: Browser, origin: str) -> Iterator[Watched]:
    context = browser.new_context(viewport=ViewportSize(width=1280, height=800), reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    found = Watched(context.new_page(), origin)
    yield found
    context.close()
    assert found.faults == []


def serious(page: Page) -> list[str]:
    """What axe-core finds seriously wrong with the page as it stands, in its light and its dark dress. Only colours are
    others in the dark."""
    found = []
    for scheme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for violation in Axe().run(page, options={"resultTypes": ["violations"], **rules}).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                nodes = [node["html"][:200] for node in violation["nodes"][:3]]
                found.append(f"{scheme}: {violation['id']}: {violation['help']}: {nodes}")
    return found


@contextmanager
def endless_request(origin: str, key: str) -> Iterator[None]:
    """A request that is running, until its client hangs up."""
    messages = [{"role": "user", "content": "Go on."}]
    body = {"model": "tiny", "messages": messages, "ignore_eos": True, "max_tokens": 1900, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{origin}/v1/chat/completions", json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()  # held: without it the connection is closed
        next(lines)
        yield
