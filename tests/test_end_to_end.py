"""The whole machine as a client meets it: `noria serve` with its embedded store, the demo model, the openai SDK."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import mul
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from noria.trace_file import read, summarise

READY_SECONDS = 150.0
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Served:
    base_url: str
    key: str
    process: subprocess.Popen[str]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=self.key, timeout=120, max_retries=0)

    def child(self, role: str) -> psutil.Process:
        """The living child whose command line shows `role`."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(c for c in children if f"noria {role}" in " ".join(c.cmdline()))

    def metrics(self) -> dict[str, float]:
        """Values by metric name, summed over labels."""
        values: dict[str, float] = {}
        for line in httpx.get(self.base_url.removesuffix("/v1") + "/metrics").text.splitlines():
            if found := re.match(r"([A-Za-z_:]\w*)(?:\{.*\})? ([-+.\dEeInfa]+)$", line):
                values[found[1]] = values.get(found[1], 0.0) + float(found[2])
        return values


@contextmanager
def serve(state: Path, *options: str) -> Iterator[Served]:
    """A `noria serve` of its own, ready, and gone afterwards with all its children."""
    command = [sys.executable, "-m", "noria", "serve", "--port", "0", "--state-dir", str(state), *options]
    environment = {**os.environ, "NORIA_API_KEY": "sk-end-to-end"}
    log = (state.parent / f"{state.name}.log").open("w+")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True)  # type: ignore[union-attr]
    reader.start()
    try:
        until = time.monotonic() + READY_SECONDS
        while not (found := re.search(r"http://\S+/v1", "".join(lines))):
            if process.poll() is not None or time.monotonic() > until:
                log.seek(0)
                pytest.fail(f"noria serve is not ready: {log.read()[-3000:]}")
            time.sleep(0.1)
        yield Served(found[0], "sk-end-to-end", process)
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        reader.join(10)
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        log.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("paged") / "state", "--kv-memory", "256MiB", "--max-model-len", "2048") as found:
        yield found


def chat(client: openai.OpenAI, text: str, **options: object):  # type: ignore[no-untyped-def]
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **options)  # type: ignore[call-overload]


def test_the_capital_of_france(served: Served) -> None:
    answer = chat(served.client(), "What is the capital of France?", temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_gives_the_same_text(served: Served) -> None:
    client, question = served.client(), "Name three rivers."
    whole = chat(client, question, temperature=0, max_tokens=40)
    chunks = list(
        chat(client, question, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_and_models(served: Served) -> None:
    client = served.client()
    answer = client.completions.create(
        model=MODEL, prompt=["The sky is", "Bread and"], max_tokens=6, temperature=0, echo=True, logprobs=2
    )
    assert answer.choices[0].text.startswith("The sky is")
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.token_logprobs[0] is None
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_texts_become_vectors_beside_a_stream(served: Served) -> None:
    client = served.client()
    seen: list[str] = []
    thread = threading.Thread(target=stream_tokens, args=(served, "Once upon a time", 30, seen))
    thread.start()
    texts = ["A cat sat on the mat.", "A kitten sits on a rug.", "The central bank raised interest rates."]
    answer = client.embeddings.create(model=MODEL, input=texts)
    cat, kitten, bank = (item.embedding for item in answer.data)
    assert len(cat) == 576 and abs(sum(x * x for x in cat) - 1) < 1e-4
    assert sum(map(mul, cat, kitten)) > sum(map(mul, cat, bank)) + 0.1
    (short,) = client.embeddings.create(model=MODEL, input=texts[0], dimensions=64, encoding_format="float").data
    assert len(short.embedding) == 64 and abs(sum(x * x for x in short.embedding) - 1) < 1e-4
    thread.join()
    assert len(seen) >= 30


def test_wrong_use_is_told_in_openai_s_terms(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError) as too_long:
        chat(client, "Hi", max_tokens=5000)
    assert too_long.value.code == "context_length_exceeded" and "2048" in str(too_long.value)
    with pytest.raises(openai.AuthenticationError):
        chat(openai.OpenAI(base_url=served.base_url, api_key="sk-wrong", max_retries=0), "Hi")


def stream_tokens(served: Served, prompt: str, max_tokens: int, seen: list[str]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    with served.client() as client:
        chunks = client.completions.create(**body, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
        seen.extend(chunk.choices[0].text for chunk in chunks)  # one by one: others watch it grow


def short_overtakes_long(served: Served) -> bool:
    """Start a 400-token request, then a 5-token one: does the short one end first?"""
    long: list[str] = []
    ends: dict[str, float] = {}

    def run_long() -> None:
        stream_tokens(served, "Once upon a time", 400, long)
        ends["long"] = time.monotonic()

    thread = threading.Thread(target=run_long)
    thread.start()
    while len(long) < 3:
        assert thread.is_alive()
        time.sleep(0.01)
    stream_tokens(served, "Hello", 5, [])
    ends["short"] = time.monotonic()
    thread.join()
    return ends["short"] < ends["long"]


TOKENS = "noria_engine_generation_tokens_total"
GAUGES = ("batch_size", "requests_waiting", "requests_running", "kv_blocks_used")


def settled_metrics(served: Served) -> dict[str, float]:
    """The figures of an idle engine: it publishes them, and gateways keep them, both for a moment."""
    until = time.monotonic() + 20
    while True:
        first = served.metrics()
        time.sleep(2.5)
        second = served.metrics()
        if first[TOKENS] == second[TOKENS] and not any(second[f"noria_engine_{gauge}"] for gauge in GAUGES):
            return second
        assert time.monotonic() < until, second


def test_a_short_request_overtakes_a_long_one(served: Served) -> None:
    before = settled_metrics(served)
    assert short_overtakes_long(served)
    after = settled_metrics(served)
    assert after[TOKENS] - before[TOKENS] == 405
    assert after["noria_engine_iterations_total"] > before["noria_engine_iterations_total"]


def test_with_static_batches_it_has_to_wait(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    options = ("--kv-memory", "256MiB", "--policy", "static", "--trace-iterations", str(file))
    with serve(tmp_path / "static", *options) as static:
        assert not short_overtakes_long(static)
    log = read(file)
    assert [request.max_tokens for request in log.requests.values()] == [400, 5]
    assert summarise(log).output_tokens == 405 and summarise(log).mean_rows == 1
    assert [reason for iteration in log.iterations for _, reason in iteration.ended] == ["length", "length"]


def test_a_stream_survives_the_death_of_its_engine(served: Served) -> None:
    undisturbed: list[str] = []
    stream_tokens(served, "The lighthouse keeper", 120, undisturbed)
    seen: list[str] = []
    thread = threading.Thread(target=stream_tokens, args=(served, "The lighthouse keeper", 120, seen))
    thread.start()
    while len(seen) < 20:
        assert thread.is_alive()
        time.sleep(0.005)
    served.child("engine").kill()
    thread.join(120)
    assert not thread.is_alive(), "the stream did not go on"
    assert "".join(seen) == "".join(undisturbed)


def test_a_client_that_leaves_frees_its_slot(served: Served) -> None:
    stream = served.client().completions.create(
        model=MODEL, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 15
    while served.metrics()["noria_engine_requests_running"] or served.metrics()["noria_gateway_streams_open"]:
        assert time.monotonic() < until, "the slot is still held"
        time.sleep(0.2)
