"""The scripts of deploy/redis start real servers on this machine: under Sentinels, and as a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from noria.engine.wire.connection import BrokerUnavailable, Store
from tests.gateway.conftest import eventually, free_port

SCRIPTS = Path(__file__).parents[1] / "deploy" / "redis"
PASSWORD = "s3cr3t"
HOST = "127.0.0.1"

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")


class Pods:
    """Processes of our scripts, each in a folder of its own, that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "password").write_text(PASSWORD)
        self._started: dict[str, tuple[subprocess.Popen[bytes], str, dict[str, str]]] = {}

    def start(self, name: str, script: str, **variables: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        given = {"REDIS_DIR": str(self.folder / name), "SENTINEL_DIR": str(self.folder / name)}
        given |= {"REDIS_PASSWORD_FILE": str(self.folder / "password"), "PATH": os.environ["PATH"], **variables}
        process = subprocess.Popen(
            ["/bin/sh", str(SCRIPTS / script)], env=given, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self._started[name] = (process, script, variables)

    def kill(self, name: str) -> None:
        process = self._started[name][0]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def start_again(self, name: str) -> None:
        _, script, variables = self._started[name]
        self.start(name, script, **variables)

    def close(self) -> None:
        for name in self._started:
            self.kill(name)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    running = Pods(tmp_path)
    yield running
    running.close()


def ports(count: int) -> list[int]:
    """The servers of a cluster talk to each other on port + 10000."""
    found: set[int] = set()
    while len(found) < count:
        found |= {port} if (port := free_port()) < 55_000 else set()
    return sorted(found)


def says(port: int, section: str, what: str, *, password: str | None = PASSWORD) -> bool:
    try:
        with redis.Redis(port=port, password=password, decode_responses=True) as client:
            return what in str(client.info(section))
    except redis.RedisError:
        return False


def keeps(store: Store, key: str) -> bool:
    try:
        store.run(("SET", key, "x"))
        return True
    except BrokerUnavailable:
        return False


def test_redis_under_sentinels_survives_its_primary_and_takes_it_back(pods: Pods) -> None:
    servers, sentinels = ports(3), ports(3)
    named = " ".join(f"{HOST}:{port}" for port in sentinels)
    first = f"{HOST}:{servers[0]}"
    for port in servers:
        more = {"REDIS_NAME": HOST, "REDIS_PORT": str(port), "REDIS_FIRST": first, "SENTINELS": named}
        pods.start(f"redis{port}", "start-replicated.sh", **more)
    eventually(lambda: says(servers[0], "replication", "'connected_slaves': 2"), 30)
    for port in sentinels:
        more = {"SENTINEL_NAME": HOST, "SENTINEL_PORT": str(port), "REDIS_FIRST": first, "SENTINEL_DOWN_AFTER": "1000"}
        pods.start(f"sentinel{port}", "start-sentinel.sh", **more)
    known = f"'status': 'ok', 'address': '{first}', 'slaves': 2, 'sentinels': 3"
    eventually(lambda: all(known in told(port) for port in sentinels), 30)
    store = Store(f"redis+sentinel://:{PASSWORD}@{named.replace(' ', ',')}/noria/0")
    eventually(lambda: keeps(store, "before"))
    eventually(lambda: says(servers[1], "keyspace", "'keys': 1") and says(servers[2], "keyspace", "'keys': 1"))
    pods.kill(f"redis{servers[0]}")
    eventually(lambda: keeps(store, "after"), 30)
    assert store.run(("EXISTS", "before", "after")) == [2]
    pods.start_again(f"redis{servers[0]}")
    eventually(lambda: says(servers[0], "replication", "'role': 'slave'"), 30)
    store.close()


def told(port: int) -> str:
    try:
        with redis.Redis(port=port, decode_responses=True) as client:
            return str(client.info("sentinel"))
    except redis.RedisError:
        return ""


def test_a_cluster_is_made_once(pods: Pods) -> None:
    servers = ports(3)
    for port in servers:
        more = {"REDIS_PORT": str(port), "REDIS_MORE": "cluster-enabled yes\ncluster-node-timeout 2000"}
        pods.start(f"redis{port}", "start.sh", **more)
    nodes = " ".join(f"localhost:{port}" for port in servers)
    given = {"REDIS_NODES": nodes, "REDIS_REPLICAS": "0", "REDIS_PASSWORD_FILE": str(pods.folder / "password")}
    command = ["/bin/sh", str(SCRIPTS / "make-cluster.sh")]
    for last in ("[OK] All 16384 slots covered.", "the cluster is made"):
        done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=60, check=True)
        assert last in done.stdout
    store = Store(f"redis+cluster://:{PASSWORD}@{HOST}:{servers[0]}")
    eventually(lambda: keeps(store, "{a}1") and keeps(store, "{b}1") and keeps(store, "{c}1"), 30)
    store.close()
