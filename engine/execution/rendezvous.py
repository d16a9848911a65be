"""How the ranks of a model find each other: a store at an address that all know, and in it the way to rank 0.

Rank 0 starts the others as processes of this machine, unless torchrun or its like has started them all. Knows no model.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from noria.engine.config import EngineConfig, Rendezvous
from noria.engine.execution.control import Failed, Hello, Line, LineClosed, decode_from_rank
from noria.engine.execution.executor import RankLost

LOCAL = "127.0.0.1"
MEET_SECONDS = 600.0
"""For all ranks to come: those of other machines are started by hand."""
SECRETS = {"redis_url", "redis_password", "redis_tls_ca", "redis_tls_cert", "redis_tls_key"}
"""Settings that other ranks have no use for."""
_WAY = "noria-control"


class _Way(msgspec.Struct, frozen=True):
    """To rank 0's control channel."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rank 0's side once all are there. `host` is the address of this machine that the others reach."""

    store: Any
    host: str
    hellos: list[Hello]
    lines: dict[int, Line]
    processes: dict[int, subprocess.Popen[bytes]]


@dataclass(frozen=True, slots=True)
class Joined:
    """Another rank's side."""

    store: Any
    host: str
    line: Line


def host(config: EngineConfig, size: int, given: Rendezvous) -> Meeting:
    """Start the other ranks, or wait for those that others start. Raises RankLost, and ValueError for what another try
    would not mend."""
    store, here = _store(given, size)
    key = secrets.token_bytes(32)
    listener = Listener((here, 0), authkey=key)
    port = listener.address[1]
    store.set(_WAY, msgspec.msgpack.encode(_Way(here, int(port), key)))
    processes: dict[int, subprocess.Popen[bytes]] = {}
    lines: dict[int, Line] = {}
    try:
        if not given.is_given:
            processes |= {rank: _spawn(config, rank, size, store.port) for rank in range(1, size)}
        hellos = []
        for hello, line in _arrivals(listener, size - 1, processes):
            hellos.append(hello)
            lines[hello.rank] = line
        return Meeting(store, here, hellos, lines, processes)
    except BaseException:
        for process in processes.values():
            process.kill()
            process.wait()
        raise
    finally:
        listener.close()


def join(given: Rendezvous) -> Joined:
    """Find rank 0. Raises LineClosed where it cannot be found."""
    try:
        store, here = _store(given, given.world_size)
        way = msgspec.msgpack.decode(store.get(_WAY), type=_Way)
        return Joined(store, here, Line(Client((way.host, way.port), authkey=way.key)))
    except (RuntimeError, OSError, EOFError, AuthenticationError) as error:
        raise LineClosed(f"rank 0 cannot be found: {error}") from error


def _store(given: Rendezvous, size: int) -> tuple[Any, str]:
    """The store, and our address as the others see it."""
    timeout = timedelta(seconds=MEET_SECONDS)
    if not given.is_given:  # nobody but us and our children knows its port
        return TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False, timeout=timeout), LOCAL
    address = f"tcp://{given.master_addr}:{given.master_port}?rank={given.rank}&world_size={size}"
    store, _, _ = next(rendezvous(address, timeout=timeout))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((given.master_addr, given.master_port))
        return store, probe.getsockname()[0]


def _spawn(config: EngineConfig, rank: int, size: int, port: int) -> subprocess.Popen[bytes]:
    settings = config.model_dump(mode="json", exclude=SECRETS)
    given = Rendezvous(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, master_addr=LOCAL, master_port=port
    )
    process = subprocess.Popen([sys.executable, "-m", "noria.engine.worker"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps({"config": settings, "rendezvous": given.model_dump()}).encode() + b"\n")
    process.stdin.flush()  # and left open: it closes when we end, however that is
    return process


def _arrivals(
    listener: Listener, count: int, processes: dict[int, subprocess.Popen[bytes]]
) -> Iterator[tuple[Hello, Line]]:
    """The first words of `count` ranks, as they come."""
    queue: SimpleQueue[tuple[Hello | Failed, Line]] = SimpleQueue()
    threading.Thread(target=_accept, args=(listener, count, queue), daemon=True).start()
    give_up = time.monotonic() + MEET_SECONDS
    while count:
        try:
            word, line = queue.get(timeout=0.2)
        except Empty:
            for rank, process in processes.items():
                if process.poll():
                    raise RankLost(f"rank {rank} ended at its start, exit code {process.returncode}") from None
            if time.monotonic() > give_up:
                raise RankLost(f"{count} ranks have not come within {MEET_SECONDS:g} s") from None
            continue
        if isinstance(word, Failed):
            raise ValueError(word.message) if word.is_final else RankLost(word.message)
        count -= 1
        yield word, line


def _accept(listener: Listener, count: int, queue: SimpleQueue[tuple[Hello | Failed, Line]]) -> None:
    while count:
        try:
            line = Line(listener.accept())
            word = decode_from_rank(line.receive())
        except (AuthenticationError, LineClosed):
            continue
        except OSError:  # nobody waits for more
            return
        if isinstance(word, Hello | Failed):
            count -= 1
            queue.put((word, line))


def place() -> str:
    """Of this process, for people."""
    return f"{socket.gethostname()}, process {os.getpid()}"
