"""A real store, a real broker, a scripted engine and a real HTTP server for the gateway's tests.

The engine here computes nothing: it publishes scripted frames over the true path, one token per iteration.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import redis
import tokenizers
import uvicorn
from pydantic import SecretStr
from tokenizers import decoders, models, pre_tokenizers

from noria.engine.wire.broker import BrokerUnavailable, EngineBroker
from noria.engine.wire.messages import (
    Claimed,
    EngineStats,
    FinishReason,
    GenerationRequest,
    ModelCard,
    TokenFrame,
    TokenizerFiles,
    TokenLogprob,
    Usage,
)
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.app import create_app
from noria.gateway.config import GatewaySettings
from noria.gateway.http.protocol import bounded

KEY = "sk-test-key"
EMBEDDING_SIZE = 8
NUM_PLACES = 16
"""Requests that a scripted engine runs at once."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_files(*more_specials: str) -> TokenizerFiles:
    """A byte-level vocabulary with the ChatML control tokens: every byte is a token, ` wörld` spans eight."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: place for place, symbol in enumerate(alphabet)}
    vocab["He"], vocab["ll"] = len(vocab), len(vocab) + 1
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("H", "e"), ("l", "l")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*SPECIALS, *more_specials])
    return TokenizerFiles(
        tokenizer_json=inner.to_str(),
        chat_template=TEMPLATE,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        add_bos=False,
    )


def embedding(prompt: list[int]) -> bytes:
    """The scripted engine's vector of a prompt: how often each id modulo the size occurs."""
    counts = [float(sum(1 for i in prompt if i % EMBEDDING_SIZE == place)) for place in range(EMBEDDING_SIZE)]
    return struct.pack(f"<{EMBEDDING_SIZE}f", *counts)


class ScriptedEngine(threading.Thread):
    """Answers every request with `answer`, one token per iteration, `pace` seconds apart."""

    def __init__(
        self,
        url: str,
        *,
        model_id: str = "tiny",
        card: dict[str, object] | None = None,
        files: TokenizerFiles | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.files = files or tokenizer_files()
        self.tokenizer = Tokenizer.load(self.files)
        self.eos = self.tokenizer.control_tokens["<|im_end|>"]
        base = ModelCard(
            id=model_id,
            aliases=(f"{model_id}-alias",),
            created=1_700_000_000,
            max_model_len=512,
            vocab_size=self.tokenizer.vocab_size,
            kv_tokens=4096,
            block_size=16,
            eos_token_ids=(self.eos,),
            reserve_output=False,
            policy="paged",
            fingerprint="fp_test",
            embedding_size=EMBEDDING_SIZE,
        )
        self.card = msgspec.structs.replace(base, **(card or {}))
        self.answer = "Hello, wörld 🎉! One two three four five."
        self.answer_ids: list[int] | None = None  # instead of `answer`
        self.predicted: tuple[int, int] | None = None  # guesses of a prediction, right and wrong, with every token
        self.logprob: Callable[[GenerationRequest], float] = lambda _: -0.25  # of every token
        self.pace = 0.0
        self.cached = 0  # tokens of every prompt that were in the prefix cache
        self.fail_with: str | None = None
        self.draining = False
        self.fail_param: str | None = None  # the client's field that the failure is blamed on
        self.seen: list[Claimed] = []
        self.cancelled: list[str] = []
        self.running: dict[str, tuple[Claimed, list[int], int]] = {}
        self.generated = 0
        self._broker = EngineBroker(url, model_id)
        self._halt = threading.Event()
        self.registered = threading.Event()

    def run(self) -> None:
        while not self._halt.is_set():
            try:
                if not self.registered.is_set():
                    self._broker.register(self.card, self.files)
                    self.registered.set()
                self._iterate()
            except BrokerUnavailable:
                self._halt.wait(0.05)
        self._broker.close()

    def stop(self) -> None:
        self._halt.set()
        self.join(10)

    def _iterate(self) -> None:
        frames: dict[str, list[TokenFrame]] = {}
        for request_id, (claimed, output, done) in list(self.running.items()):
            frame = self._next_frame(claimed, output, done)
            frames.setdefault(claimed.request.gateway, []).append(frame)
            self.running[request_id] = (claimed, output, done + len(frame.token_ids))
            if frame.finish is not None:
                del self.running[request_id]
        stats = EngineStats(
            running=len(self.running),
            kv_blocks_total=99,
            generation_tokens_total=self.generated,
            draining=self.draining,
        )
        room = 0 if self.draining else NUM_PLACES - len(self.running)
        outcome = self._broker.exchange(frames, stats, max_requests=room, max_blocks=10_000)
        for request_id in outcome.fenced:
            self.running.pop(request_id, None)
        for claimed in outcome.claimed:
            self.seen.append(claimed)
            done = sum(len(frame.token_ids) for frame in claimed.delivered)
            self.running[claimed.request.id] = (claimed, self._output(claimed), done)
        ends: dict[str, list[TokenFrame]] = {}
        for request_id in outcome.cancelled:
            self.cancelled.append(request_id)
            if (found := self.running.pop(request_id, None)) is not None:
                claimed, _, done = found
                usage = Usage(len(claimed.request.prompt), done, self.cached)
                end = TokenFrame(request_id, claimed.epoch, done, [], finish=FinishReason.CANCELLED, usage=usage)
                ends.setdefault(claimed.request.gateway, []).append(end)
        if ends:
            self._broker.exchange(ends, stats, max_requests=0, max_blocks=0)
        if not self.running:
            self._broker.wait(0.05)
        elif self.pace:
            self._halt.wait(self.pace)

    def _output(self, claimed: Claimed) -> list[int]:
        sampling = claimed.request.sampling
        answer = self.tokenizer.encode(self.answer) if self.answer_ids is None else self.answer_ids
        output = [*answer, self.eos]
        if sampling.ignore_eos:
            output = (output[:-1] * (sampling.max_tokens // len(output) + 2))[: sampling.max_tokens]
        return output[: sampling.max_tokens]

    def _next_frame(self, claimed: Claimed, output: list[int], done: int) -> TokenFrame:
        request, sampling = claimed.request, claimed.request.sampling
        if self.fail_with is not None:
            error, param = self.fail_with, self.fail_param
            return TokenFrame(
                request.id, claimed.epoch, done, [], finish=FinishReason.ERROR, error=error, error_param=param
            )
        if request.pooling is not None:
            usage = Usage(len(request.prompt), 0)
            vector = embedding(request.prompt)
            return TokenFrame(request.id, claimed.epoch, 0, [], finish=FinishReason.STOP, usage=usage, embedding=vector)
        ids = output[done : done + 1]
        finish = None
        if done + len(ids) >= len(output):
            finish = FinishReason.STOP if ids and ids[-1] == self.eos else FinishReason.LENGTH
        self.generated += len(ids)
        scores = None if sampling.logprobs is None else [self._score(request, i, sampling.logprobs) for i in ids]
        prompt = None
        if done == 0 and sampling.prompt_logprobs is not None:
            prompt = [None, *(self._score(request, i, sampling.prompt_logprobs) for i in request.prompt[1:])]
        is_told = finish is not None or (self.cached and done == 0)
        usage = Usage(len(request.prompt), done + len(ids), self.cached) if is_told else None
        predicted = None if request.prediction is None else self.predicted
        return TokenFrame(
            request.id,
            claimed.epoch,
            done,
            ids,
            scores,
            finish,
            usage,
            prompt_logprobs=prompt,
            predicted=predicted,
        )

    def _score(self, request: GenerationRequest, token_id: int, num_top: int) -> TokenLogprob:
        own = self.logprob(request)
        others = [(token_id + 1 + k) % self.card.vocab_size for k in range(num_top - 1)]
        top = [(token_id, own), *((other, -1.0 - k) for k, other in enumerate(others))] if num_top else []
        return TokenLogprob(token_id, own, top, rank=1)


class RunningGateway:
    """The app under uvicorn in a thread of its own, on a free port."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.app = create_app(settings)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            self.app,
            http=bounded(settings.max_head_bytes, settings.head_timeout),
            loop="uvloop",
            lifespan="on",
            log_config=None,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self._thread.start()

    def client(self, key: str | None = KEY) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._listener.close()


def eventually(condition, seconds: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    """Wait until `condition()` holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not come true in time"
        time.sleep(0.01)


def start_store(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """A redis-server on a TCP port; returns once it answers."""
    command = ["redis-server", "--port", str(port), "--dir", str(folder), "--save", "", "--bind", "127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port, socket_connect_timeout=1)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    eventually(answers)
    return process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    process = start_store(tmp_path_factory.mktemp("store"), port)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="module")
def shared_engine(store_url: str) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(store_url)
    engine.start()
    assert engine.registered.wait(10)
    yield engine
    engine.stop()


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> Iterator[ScriptedEngine]:
    """The module's engine, with its script as it was after the test."""
    answer = shared_engine.answer
    shared_engine.seen.clear()
    shared_engine.cancelled.clear()
    yield shared_engine
    shared_engine.answer, shared_engine.answer_ids = answer, None
    shared_engine.cached = 0
    shared_engine.pace, shared_engine.fail_with, shared_engine.fail_param = 0.0, None, None
    shared_engine.logprob = lambda _: -0.25
    eventually(lambda: not shared_engine.running)


@pytest.fixture(scope="module")
def gateway(store_url: str, shared_engine: ScriptedEngine) -> Iterator[RunningGateway]:
    running = RunningGateway(GatewaySettings(redis_url=store_url, api_key=SecretStr(f"{KEY},sk-other")))
    with running.client() as client:
        eventually(lambda: client.get("/readyz").status_code == 200)
    yield running
    running.stop()


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[httpx.Client]:
    with gateway.client() as found:
        yield found


@pytest.fixture(scope="session")
def files() -> TokenizerFiles:
    return tokenizer_files()


@pytest.fixture(scope="session")
def tokenizer(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.load(files)


@pytest.fixture
def own_port() -> int:
    return free_port()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Stores, engines and gateways of a test's own, all gone after it."""
    launched = Launch(tmp_path)
    yield launched
    launched.stop()


class Launch:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stores: list[subprocess.Popen[bytes]] = []
        self._parts: list[ScriptedEngine | RunningGateway] = []

    def store(self, port: int) -> subprocess.Popen[bytes]:
        self._stores.append(start_store(self._folder, port))
        return self._stores[-1]

    def engine(self, url: str, files: TokenizerFiles | None = None, **card: object) -> ScriptedEngine:
        engine = ScriptedEngine(url, model_id=str(card.get("id", "tiny")), card=card, files=files)
        engine.start()
        self._parts.append(engine)
        return engine

    def parts(self, model_id: str) -> ScriptedEngine:
        """The first engine of that model."""
        return next(p for p in self._parts if isinstance(p, ScriptedEngine) and p.card.id == model_id)

    def gateway(self, url: str, *, api_key: str = KEY, **settings: object) -> RunningGateway:
        running = RunningGateway(GatewaySettings(redis_url=url, api_key=SecretStr(api_key), **settings))  # type: ignore[arg-type]
        self._parts.append(running)
        return running

    def eventually(self, condition, seconds: float = 30.0) -> None:  # type: ignore[no-untyped-def]
        eventually(condition, seconds)

    def stop(self) -> None:
        for part in reversed(self._parts):
            part.stop()
        for store in self._stores:
            store.terminate()
            store.wait(10)
