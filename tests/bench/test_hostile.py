"""An attacker sees how it was answered, and begins anew as soon as it was."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from bench.hostile import HUGE, head, p99, send

REFUSED = b"HTTP/1.1 413 Content Too Large\r\nconnection: close\r\n\r\n"


@pytest.fixture
def deaf() -> Iterator[tuple[str, int]]:
    """Reads a head, refuses it, and reads no more while the connection stays open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(REFUSED)
                ended.wait(10)

        ended = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        ended.set()
        thread.join(10)


def test_a_refusal_is_seen_though_the_body_is_not_read(deaf: tuple[str, int]) -> None:
    started = time.monotonic()
    assert send(deaf, head(length=HUGE) + b"x" * HUGE) == 4
    assert time.monotonic() - started < 2


def test_nobody_there_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    assert send(address, b"x") == 0


def test_the_99th_percentile_leaves_one_of_a_hundred_out() -> None:
    assert p99([1.0] * 99 + [50.0]) == 1.0
