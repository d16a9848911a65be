"""The stores that the model-based test runs on: a Redis, the embedded Valkey, a cluster of three nodes.

The scripts' clock is theirs to set: TIME is read from a key, and nothing else of a script is touched. Knows processes
and connections; nothing of pools.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from bench.store import Store as Server
from bench.store import find_binary, running_store
from noria.engine.wire.connection import SCRIPTS, Command
from noria.engine.wire.connection import Store as Connection

_TIME = "redis.call('TIME')"


class ClockedStore:
    """`client` is connected to the node that has the slot of `prefix`; the clock lies there too."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.client = client
        self._clock = prefix + "clock"

    def set_clock(self, ms: int) -> None:
        seconds, rest = divmod(ms, 1000)
        self.client.pipeline().delete(self._clock).rpush(self._clock, seconds, rest * 1000).execute()

    def run(self, *commands: Command) -> list[Any]:
        """As `connection.Store.run`."""
        raise NotImplementedError

    def flush(self) -> None:
        raise NotImplementedError

    def key_names(self) -> set[str]:
        raise NotImplementedError

    def _load(self, header: str = "") -> dict[str, str]:
        """The pools' scripts, with the clock of these tests: their own names -> the store's."""
        clock = f"redis.call('LRANGE', '{self._clock}', 0, 1)"
        texts = {s.sha: s.text.replace(_TIME, clock) for s in SCRIPTS if "local pool" in s.text and _TIME in s.text}
        return {sha: self.client.script_load(header + text) for sha, text in texts.items()}


class SingleStore(ClockedStore):
    """One server."""

    def __init__(self, server: Server, prefix: str) -> None:
        super().__init__(server.client, prefix)
        self._connection = Connection(server.url)
        self._shas = self._load()
        self.key_names, self.flush = server.key_names, server.client.flushall

    def run(self, *commands: Command) -> list[Any]:
        return self._connection.run(*((c[0], self._shas.get(c[1], c[1]), *c[2:]) for c in commands))

    def close(self) -> None:
        self._connection.close()


class Cluster(ClockedStore):
    """Three nodes without replicas. Scripts run in strict mode: a key of another slot is refused."""

    def __init__(self, cluster: redis.RedisCluster, prefix: str) -> None:
        node = cluster.get_node_from_key(prefix)
        super().__init__(cluster.get_redis_connection(node), prefix)
        self._cluster = cluster
        self._shas = self._load("#!lua\n")

    def run(self, *commands: Command) -> list[Any]:
        return [self._run(command) for command in commands]

    def _run(self, command: Command) -> Any:
        if command[0] == "CONFIG":
            return []
        if command[0] == "EVALSHA":
            if command[1] in self._shas:
                return self.client.execute_command("EVALSHA", self._shas[command[1]], *command[2:])
            text = next(script.text for script in SCRIPTS if script.sha == command[1])
            command = ("EVAL", "#!lua\n" + text, *command[2:])
        return self._cluster.execute_command(*command)

    def key_names(self) -> set[str]:
        return {key.decode() for key in self._cluster.keys("*", target_nodes=redis.RedisCluster.PRIMARIES)}

    def flush(self) -> None:
        self._cluster.flushall(target_nodes=redis.RedisCluster.PRIMARIES)


@contextmanager
def clocked_store(kind: str, prefix: str) -> Iterator[ClockedStore]:
    """`kind`: redis, valkey or cluster."""
    if kind == "cluster":
        with _cluster() as cluster:
            yield Cluster(cluster, prefix)
        return
    with running_store(kind) as server:
        store = SingleStore(server, prefix)
        yield store
        store.close()


def _free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55_000:  # the nodes talk to each other on port + 10000
            return port


@contextmanager
def _cluster() -> Iterator[redis.RedisCluster]:
    binary, cli = find_binary(), shutil.which("redis-cli")
    if cli is None:
        pytest.skip("redis-cli is not installed")
    with tempfile.TemporaryDirectory(prefix="noria-cluster-") as folder, ExitStack() as stack:
        nodes = []
        for name in "abc":
            port = _free_port()
            home = Path(folder, name)
            home.mkdir()
            options = f"--port {port} --cluster-enabled yes --save  --loglevel warning --bind 127.0.0.1"
            process = subprocess.Popen(
                [binary, *options.split(" "), "--dir", str(home)], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
            )
            stack.callback(process.wait, 10)
            stack.callback(process.terminate)
            nodes.append(f"127.0.0.1:{port}")
        until = time.monotonic() + 30
        create = [cli, "--cluster", "create", *nodes, "--cluster-replicas", "0", "--cluster-yes"]
        while subprocess.run(create, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode:
            assert time.monotonic() < until, "the cluster did not form"
            time.sleep(0.2)
        host, port_text = nodes[0].split(":")
        client = redis.RedisCluster(host, int(port_text), protocol=2)
        while any(b"cluster_state:ok" not in _state(client, node) for node in client.get_primaries()):
            assert time.monotonic() < until, "the cluster is not up"
            time.sleep(0.05)
        yield client
        client.close()


def _state(client: redis.RedisCluster, node: Any) -> bytes:
    with client.get_redis_connection(node).client() as connection:
        connection.response_callbacks.clear()
        return bytes(connection.execute_command("CLUSTER", "INFO"))
