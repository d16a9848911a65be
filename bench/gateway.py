"""CPU that the gateway process spends per streamed token over HTTP, with an engine that computes nothing.

    python bench/gateway.py --streams 64 --tokens 300 --rounds 3 --api chat responses chat-logprobs

Starts a redis-server and a gateway of its own, publishes one frame per stream and iteration over the true path, and
reads the gateway's CPU time around each round. Requests' own cost (parsing, queueing) is measured by rounds of 16
tokens and taken off together with those tokens. `--api` chooses what is asked for, measured in turns; with `-logprobs`
it is every token's log-probability and those of five alternatives. Client and engine live in this process: their CPU
does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import psutil
import redis
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from noria.engine.wire.broker import EngineBroker
from noria.engine.wire.messages import (
    EngineStats,
    FinishReason,
    ModelCard,
    TokenFrame,
    TokenizerFiles,
    TokenLogprob,
    Usage,
)

MODEL = "bench"
GATEWAY = """
import sys
from noria.gateway.config import GatewaySettings
from noria.gateway.server import run
sys.exit(run(GatewaySettings()))
"""


def byte_tokenizer() -> TokenizerFiles:
    """Every byte is a token, its own number the id: so what the engine here says is letters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these stand for themselves in BPE
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return TokenizerFiles(inner.to_str(), template, "<eos>", "<eos>", False)


SCORES = [
    TokenLogprob(97 + i, -0.1234567 - i, [(97 + (i + place) % 26, -0.1234567 - i - place / 7) for place in range(5)], 1)
    for i in range(26)
]
"""Of each letter, with five alternatives."""


class Engine(threading.Thread):
    """Gives every request it holds one token per iteration, `pace` seconds apart, once all have come."""

    def __init__(self, url: str, streams: int, pace: float) -> None:
        super().__init__(daemon=True)
        self.broker = EngineBroker(url, MODEL)
        card = ModelCard(
            id=MODEL, aliases=(), created=1, max_model_len=8192, vocab_size=257, kv_tokens=1 << 20, block_size=16,
            eos_token_ids=(256,), reserve_output=False, policy="paged", fingerprint="fp_bench",
        )  # fmt: skip
        self.broker.register(card, byte_tokenizer())
        self.streams, self.pace, self.halt = streams, pace, False

    def run(self) -> None:
        held: dict[str, list] = {}  # type: ignore[type-arg]
        going = False
        while not self.halt:
            frames: dict[str, list[TokenFrame]] = {}
            for request_id, row in list(held.items()) if going else ():
                claimed, done = row
                last = done + 1 == claimed.request.sampling.max_tokens
                scores = None if claimed.request.sampling.logprobs is None else [SCORES[done % 26]]
                frame = TokenFrame(
                    request_id, claimed.epoch, done, [97 + done % 26], scores,
                    finish=FinishReason.LENGTH if last else None, usage=Usage(1, done + 1) if last else None,
                )  # fmt: skip
                frames.setdefault(claimed.request.gateway, []).append(frame)
                row[1] += 1
                if last:
                    del held[request_id]
            outcome = self.broker.exchange(frames, EngineStats(), max_requests=self.streams, max_blocks=1 << 20)
            for claimed in outcome.claimed:
                held[claimed.request.id] = [claimed, 0]
            going = bool(held) and (going or len(held) == self.streams)
            if going:
                time.sleep(self.pace)
            else:
                self.broker.wait(0.02)


@dataclass(frozen=True)
class Api:
    """One way to ask for a stream: `ask` makes the body, `chunk` is in every piece of text, `end` in the last event."""

    path: str
    ask: Callable[[int], dict[str, Any]]
    chunk: bytes
    end: bytes


MESSAGES = [{"role": "user", "content": "a"}]


def _chat(**more: Any) -> Api:
    def ask(tokens: int) -> dict[str, Any]:
        return {"messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True, **more}

    return Api("/v1/chat/completions", ask, b'"delta":{"content":', b"data: [DONE]")


def _responses(**more: Any) -> Api:
    def ask(tokens: int) -> dict[str, Any]:
        return {"input": MESSAGES, "max_output_tokens": tokens, "store": False, **more}

    return Api("/v1/responses", ask, b'"type":"response.output_text.delta"', b"event: response.incomplete")


APIS = {
    "chat": _chat(),
    "responses": _responses(),
    "chat-logprobs": _chat(logprobs=True, top_logprobs=5),
    "responses-logprobs": _responses(include=["message.output_text.logprobs"], top_logprobs=5),
}


async def stream(port: int, api: Api, tokens: int) -> int:
    """One stream; returns the number of text chunks in it."""
    body = orjson.dumps({"model": MODEL, "stream": True, **api.ask(tokens)})
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST {api.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    if api.end not in answer:
        raise RuntimeError(f"a stream did not end: {answer[-300:]!r}")
    return answer.count(api.chunk)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def round_of(process: psutil.Process, port: int, api: Api, streams: int, tokens: int) -> tuple[float, float, int]:
    """(CPU seconds, wall seconds, text chunks)."""
    before, began = cpu(process), time.perf_counter()
    chunks = sum(await asyncio.gather(*(stream(port, api, tokens) for _ in range(streams))))
    return cpu(process) - before, time.perf_counter() - began, chunks


async def measure(options: argparse.Namespace, process: psutil.Process, port: int) -> dict[str, float]:
    """The median cost of each API, in microseconds."""
    shortest = 16  # tokens: the least that every API takes
    costs: dict[str, list[float]] = {name: [] for name in options.api}
    for name in options.api:
        await round_of(process, port, APIS[name], options.streams, 50)  # warm
    for name in [*options.api] * options.rounds:
        # CPU times come in ticks of 10 ms: the short rounds are repeated to be seen at all.
        opening = [(await round_of(process, port, APIS[name], options.streams, shortest))[0] for _ in range(3)]
        spent, wall, chunks = await round_of(process, port, APIS[name], options.streams, options.tokens)
        num_tokens = options.streams * (options.tokens - shortest)
        costs[name].append((spent - statistics.mean(opening)) / num_tokens * 1e6)
        print(
            f"{name}: {num_tokens} tokens in {chunks} chunks, {wall:.2f} s: {num_tokens / wall:,.0f} tokens/s, "
            f"{costs[name][-1]:.1f} us of CPU per token ({spent / num_tokens * 1e6:.1f} with the requests' own cost)"
        )
    return {name: statistics.median(found) for name, found in costs.items()}


def run(options: argparse.Namespace) -> dict[str, float]:
    store_port, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = shutil.which("redis-server") or "redis-server"
        store = subprocess.Popen(
            [server, "--port", str(store_port), "--dir", folder, "--save", "", "--bind", "127.0.0.1"],
            stdout=subprocess.DEVNULL,
        )
        url = f"redis://127.0.0.1:{store_port}/0"
        environment = os.environ | {"NORIA_REDIS_URL": url, "NORIA_GATEWAY_PORT": str(port), "NORIA_API_KEY": ""}
        gateway = subprocess.Popen([sys.executable, "-c", GATEWAY], env=environment, stderr=subprocess.DEVNULL)
        try:
            _until(lambda: bool(redis.Redis(port=store_port).ping()))
            engine = Engine(url, options.streams, options.pace)
            engine.start()
            _until(lambda: _get(port, "/readyz") == 200)
            costs = asyncio.run(measure(options, psutil.Process(gateway.pid), port))
            engine.halt = True
            engine.join(10)
            return costs
        finally:
            gateway.terminate()
            gateway.wait(20)
            store.terminate()
            store.wait(20)


def _get(port: int, path: str) -> int:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        return int(connection.recv(64).split()[1])


def _until(condition) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + 30
    while True:
        try:
            if condition():
                return
        except (OSError, redis.ConnectionError):
            pass
        if time.monotonic() > until:
            raise RuntimeError("did not start")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", choices=sorted(APIS), nargs="+", default=["chat"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="per stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.01, help="seconds between iterations")
    parser.add_argument("--bar", type=float, default=0.0, help="exit with 1 if a median is above this; 0: no bar")
    options = parser.parse_args()
    costs = run(options)
    for name, cost in costs.items():
        print(f"{name}: median {cost:.1f} us of CPU per streamed token at {options.streams} streams")
    return int(bool(options.bar) and max(costs.values()) > options.bar)


if __name__ == "__main__":
    sys.exit(main())
