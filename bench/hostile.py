"""What attackers can do to others: the time to the first token of a careful client, beside each kind of attack.

    python -m bench.hostile                                     # 1,000 slow clients, 20 s of each attack
    python -m bench.hostile --seconds 4 --connections 200       # a short look

The attacks: clients that send their heads byte by byte; clients that read nothing; bodies of 50 MB; JSON nested 10,000
deep; messages and variables full of template code; floods of header lines; bytes of chance. The careful client's 99th
percentile beside each may be twice that just before it. After all of them every process must live and answer. Attackers
run in a process of their own at low priority, but on the same processors: part of what the client loses goes to them.
Starts everything itself. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.cluster import KEY, Cluster, status
from bench.tiny_model import make

Address = tuple[str, int]
Tally = Any
"""Shared counts of answers, by the hundreds of their status."""
Attack = Callable[[Address, int, Tally], None]
TIMES = 2.0  # of the 99th percentile
HUGE = 50 * 2**20
DEEP = 10_000


def head(path: str = "/v1/chat/completions", length: int = 0, more: str = "") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "connection: close",
        f"authorization: Bearer {KEY}",
        f"content-length: {length}",
    ]
    return ("\r\n".join(lines) + "\r\n" + more + "\r\n").encode()


def send(address: Address, data: bytes) -> int:
    """The hundreds of the answer's status; 0: there was none. Sends no more once an answer comes, to begin anew."""
    rest, answer = memoryview(data), b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=2) as connection:
        while rest:
            readable, writable, _ = select.select([connection], [connection], [], 2)
            if readable or not writable:
                break
            rest = rest[connection.send(rest[: 1 << 18]) :]
        answer = connection.recv(4096)
    return int(answer[9:10]) if answer[9:10].isdigit() else 0


def slow_heads(address: Address, connections: int, _: Tally) -> None:
    """All open at once, a byte each now and then."""
    text, sockets = head(), list[socket.socket]()
    for place in range(10_000):
        while len(sockets) < connections:
            with contextlib.suppress(OSError):
                sockets.append(socket.create_connection(address, timeout=2))
        for one in list(sockets):
            try:
                one.send(text[place % len(text) : place % len(text) + 1])
            except OSError:  # cut off, as it should be
                sockets.remove(one)
                one.close()
        time.sleep(0.5)


def deaf_readers(address: Address, connections: int, _: Tally) -> None:
    """Streams that nobody reads, from sockets with the smallest buffers."""
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    sockets = []
    for _ in range(min(connections, 32)):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        with contextlib.suppress(OSError):
            one.connect(address)
            one.sendall(head("/v1/completions", len(body)) + body)
        sockets.append(one)
        time.sleep(0.05)
    time.sleep(3600)


def repeat(data: Callable[[], bytes], pause: float) -> Attack:
    """From four clients at once, again and again."""

    def attack(address: Address, _: int, tally: Tally) -> None:
        def one() -> None:
            while True:
                tally[send(address, data())] += 1
                time.sleep(pause)

        threads = [threading.Thread(target=one, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        threads[0].join()

    return attack


def chat(content: object, **fields: object) -> bytes:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields})
    return head(length=len(body)) + body.encode()


def deep() -> bytes:
    body = '{"model": "tiny", "messages": ' + "[" * DEEP + "]" * DEEP + "}"
    return head(length=len(body)) + body.encode()


BOMB = "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}{{ ''.__class__.__mro__ }}"

ATTACKS: dict[str, Attack] = {
    "slow heads": slow_heads,
    "deaf readers": deaf_readers,
    "bodies of 50 MB": repeat(lambda: head(length=HUGE) + b"x" * HUGE, 0.05),
    "deep JSON": repeat(deep, 0.02),
    "template code": repeat(lambda: chat(BOMB * 5, chat_template_kwargs={"x": BOMB, "y": [BOMB] * 50}), 0.02),
    "header floods": repeat(lambda: head(more="".join(f"x-{i}: {'y' * 60}\r\n" for i in range(5000))), 0.02),
    "bytes of chance": repeat(lambda: random.randbytes(20_000), 0.02),
}


def first_tokens(url: str, seconds: float) -> list[float]:
    """Seconds to the first token of one request after the other."""
    times = []
    body = {"model": "tiny", "prompt": "careful", "max_tokens": 2, "stream": True}
    until = time.monotonic() + seconds
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        while time.monotonic() < until:
            started = time.monotonic()
            with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                next(answer.iter_raw())
                times.append(time.monotonic() - started)
                if answer.status_code != 200:
                    raise SystemExit(f"the careful client got {answer.status_code}")
    return times


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


def attacked(name: str, url: str, options: argparse.Namespace) -> tuple[list[float], str]:
    """The careful client's times beside an attack, and how the attackers were answered."""
    host, _, port = url.removeprefix("http://").partition(":")
    tally = multiprocessing.Array("i", 10)
    process = multiprocessing.get_context("fork").Process(
        target=_attack, args=(name, (host, int(port)), options.connections, tally), daemon=True
    )
    process.start()
    try:
        time.sleep(min(2.0, options.seconds / 4))
        times = first_tokens(url, options.seconds)
    finally:
        process.kill()
        process.join()
    answers = {f"{hundreds}xx" if hundreds else "cut off": count for hundreds, count in enumerate(tally) if count}
    return times, ", ".join(f"{count} {what}" for what, count in answers.items())


def _attack(name: str, address: Address, connections: int, tally: Tally) -> None:
    os.nice(10)
    ATTACKS[name](address, connections, tally)


def run(cluster: Cluster, options: argparse.Namespace) -> list[str]:
    """Print a line for each attack; returns what is wrong."""
    url, faults = cluster.gateways[0].url, []
    first_tokens(url, 2.0)
    for name in ATTACKS:
        calm = p99(first_tokens(url, options.seconds / 2))  # each time anew: whatever else runs here changes
        times, answers = attacked(name, url, options)
        worst = p99(times)
        print(
            f"{name:16} p99 {1000 * calm:6.1f} ms alone, {1000 * worst:6.1f} ms beside = {worst / calm:.2f}x "
            f"({len(times)} requests; {answers})",
            flush=True,
        )
        if worst > TIMES * calm:
            faults.append(f"{name}: {worst / calm:.1f}x")
        if dead := [part.name for part in cluster.parts if not part.alive]:
            return [*faults, f"{name} ended {dead}"]
    if status(f"{url}/readyz") != 200:
        faults.append("the gateway is not ready afterwards")
    errors = [line for part in cluster.parts for line in part.log().splitlines() if "unexpected error" in line]
    return faults + errors[:3]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    parser.add_argument("--connections", type=int, default=1000, help="slow clients")
    options = parser.parse_args(arguments)
    files = options.connections + 1024
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, most) if most > 0 else files, most))
    with tempfile.TemporaryDirectory(prefix="noria-hostile-") as folder:
        model = make(Path(folder) / "tiny")
        engine = ("--kv-memory=64MiB",)
        with Cluster(model, num_engines=1, num_gateways=1, engine_options=engine) as cluster:
            faults = run(cluster, options)
    print("wrong: " + "; ".join(faults) if faults else "all within the bars")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
