"""Stores of several servers as real processes: a cluster of three, or a primary and its replica under three Sentinels.

Knows processes and their options; nothing of what is kept in them.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from redis.crc import key_slot

from bench.store import find_binary

NAME = "mymaster"


class Server:
    """One process on a port of its own, which can be killed and started again with what it had written."""

    def __init__(self, folder: Path, port: int, options: str, *, sentinel: bool = False) -> None:
        folder.mkdir()
        self.port = port
        self._argv = [find_binary(), *(["sentinel.conf", "--sentinel"] if sentinel else []), "--port", str(port)]
        self._argv += ["--bind", "127.0.0.1", "--loglevel", "warning", *options.split()]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        self._process = subprocess.Popen(
            self._argv, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        await_true(self.answers)

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)


class Servers:
    """`url` is the address of them all."""

    def __init__(self, url: str, servers: list[Server]) -> None:
        self.url = url
        self.servers = servers

    def at(self, port: int) -> Server:
        return next(server for server in self.servers if server.port == port)


def await_true(condition, seconds: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("did not come true in time")
        time.sleep(0.05)


@contextmanager
def running_cluster() -> Iterator[Servers]:
    """Three primaries without replicas. Raises FileNotFoundError without redis-server or redis-cli."""
    cli = shutil.which("redis-cli")
    if cli is None:
        raise FileNotFoundError("redis-cli is not installed")
    options = "--cluster-enabled yes --appendonly yes --cluster-node-timeout 2000 --cluster-require-full-coverage no"
    with _folder() as folder:
        servers = [Server(folder / name, _free_port(), options) for name in "abc"]
        try:
            for server in servers:
                server.start()
            nodes = [f"127.0.0.1:{server.port}" for server in servers]
            create = [cli, "--cluster", "create", *nodes, "--cluster-replicas", "0", "--cluster-yes"]
            await_true(lambda: not subprocess.run(create, stdin=subprocess.DEVNULL, capture_output=True).returncode)
            await_true(lambda: all(_cluster_is_up(server.port) for server in servers))
            yield Servers(f"redis+cluster://{nodes[0]},{nodes[1]}", servers)
        finally:
            for server in servers:
                server.kill()


@contextmanager
def running_sentinels(down_after: float = 1.0) -> Iterator[Servers]:
    """A primary (the first server), its replica, three Sentinels that replace it after `down_after` seconds."""
    with _folder() as folder:
        ports = [_free_port() for _ in range(5)]
        store = "--appendonly yes --repl-diskless-sync-delay 0"
        servers = [
            Server(folder / "primary", ports[0], store),
            Server(folder / "replica", ports[1], f"{store} --replicaof 127.0.0.1 {ports[0]}"),
        ]
        for port in ports[2:]:
            servers.append(Server(folder / str(port), port, "", sentinel=True))
            (folder / str(port) / "sentinel.conf").write_text(
                f"sentinel monitor {NAME} 127.0.0.1 {ports[0]} 2\n"
                f"sentinel down-after-milliseconds {NAME} {int(1000 * down_after)}\n"
                f"sentinel failover-timeout {NAME} 5000\n"
            )
        try:
            for server in servers:
                server.start()
            await_true(lambda: all(_knows_all(port) for port in ports[2:]))
            hosts = ",".join(f"127.0.0.1:{port}" for port in ports[2:])
            yield Servers(f"redis+sentinel://{hosts}/{NAME}/0", servers)
        finally:
            for server in servers:
                server.kill()


def primary_port(sentinel_port: int) -> int:
    """Where the primary is, as a Sentinel says."""
    with redis.Redis(port=sentinel_port, decode_responses=True) as client:
        return int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)[1])


def move_slots(source: Server, target: Server, servers: list[Server], half_way: float = 0.0) -> int:
    """Hand every slot in which `source` has keys over to `target`, key by key, as `redis-cli --cluster reshard` does.
    Stands still for `half_way` seconds where half of a slot's keys have gone. Returns the number of slots."""
    clients = {server.port: redis.Redis(port=server.port) for server in servers}
    at, to = clients[source.port], clients[target.port]
    name = {port: client.execute_command("CLUSTER", "MYID").decode() for port, client in clients.items()}
    slots = {key_slot(key) for key in at.scan_iter(count=1000)}
    for slot in slots:
        to.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", name[source.port])
        at.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", name[target.port])
        half = (at.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) + 1) // 2
        _move_keys(at, slot, target.port, most=half)
        time.sleep(half_way)
        while at.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot):
            _move_keys(at, slot, target.port, most=100)
        for client in (to, at, *clients.values()):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name[target.port])
    for client in clients.values():
        client.close()
    return len(slots)


def _move_keys(at: redis.Redis, slot: int, port: int, most: int) -> None:
    keys = at.execute_command("CLUSTER", "GETKEYSINSLOT", slot, most)
    if keys:
        at.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)


def _cluster_is_up(port: int) -> bool:
    with redis.Redis(port=port) as client:
        return b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True)


def _knows_all(port: int) -> bool:
    with redis.Redis(port=port, decode_responses=True) as client:
        primary = client.sentinel_master(NAME)
        return int(primary["num-slaves"]) == 1 and int(primary["num-other-sentinels"]) == 2


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="noria-servers-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _free_port() -> int:
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        if port < 55_000:  # the servers of a cluster talk to each other on port + 10000
            return port
