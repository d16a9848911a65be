"""One HTTP request over a connection of its own, byte for byte as told, and what came back.

Knows no endpoint. Made for requests that no HTTP library would send.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass
class Answer:
    """`status` 0: the connection was closed without one."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def stream_ended(self) -> bool:
        """Whether the last event of a stream is an end, good or bad."""
        last = self.body.rstrip(b"\n").rpartition(b"\n\n")[2]
        ends = (b"data: [DONE]", b'data: {"error":', b"event: response.")
        return any(end in last for end in ends) and b".delta" not in last

    @cached_property
    def first_object(self) -> dict[str, Any]:
        """The body, or the first event of a stream; `{}` where that is no object."""
        text = self.body
        if self.is_stream:
            text = text.partition(b"data: ")[2].partition(b"\n")[0]
        try:
            found = json.loads(text)
        except ValueError:
            return {}
        if isinstance(found, dict) and isinstance(found.get("response"), dict):
            found = found["response"]
        return found if isinstance(found, dict) else {}


def exchange(
    address: tuple[str, int],
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    patience: float,
    cut: bool = False,
) -> Answer:
    """Send and read to the end. With `cut` more bytes are promised than sent. Raises TimeoutError, ConnectionError, and
    ValueError for what is no HTTP."""
    length = len(body) + 100 if cut else len(body)
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {length}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""])
    started = time.monotonic()
    with socket.create_connection(address, timeout=patience) as connection:
        received = bytearray()
        try:
            connection.sendall(head.encode("latin-1") + body)
            if cut:
                connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(1 << 18):
                received += chunk
                if time.monotonic() - started > patience:
                    raise TimeoutError
        except (BrokenPipeError, ConnectionResetError):
            if not received:
                raise
    return _parsed(bytes(received), time.monotonic() - started)


def _parsed(received: bytes, seconds: float) -> Answer:
    while received.startswith(b"HTTP/1.1 100"):
        received = received.partition(b"\r\n\r\n")[2]
    if not received:
        return Answer(seconds=seconds)
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _dechunked(body)
    return Answer(int(first.split()[1]), headers, body, seconds)


def _dechunked(body: bytes) -> bytes:
    parts, place = [], 0
    while True:
        end = body.index(b"\r\n", place)
        size = int(body[place:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        place = end + 4 + size


def gauge(url: str, name: str) -> float:
    """A metric without labels, from `/metrics`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
    raise KeyError(name)
