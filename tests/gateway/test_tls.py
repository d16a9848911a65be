"""TLS to the store and at the gateway, with real certificates; and the store's user with the least rights."""

from __future__ import annotations

import hashlib
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from bench.store import find_binary
from noria.engine.wire.connection import BrokerUnavailable, Store
from noria.gateway.config import GatewaySettings
from noria.probe import probe
from tests.gateway.conftest import eventually, free_port
from tests.gateway.test_reload import Process

PASSWORD = "s3cr3t"
ACL = Path(__file__).parents[2] / "deploy" / "redis" / "users.acl"


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A key and a certificate for 127.0.0.1, which the authority of the folder vouches for."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl(folder, "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1")
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san"]
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signed)
    return str(folder / f"{name}.crt"), str(folder / f"{name}.key")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl(folder, "req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", "-days", "2")
    return folder


def _write_rules(folder: Path) -> None:
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    rules = [line for line in ACL.read_text().splitlines() if line.startswith("user ")]
    (folder / "users.acl").write_text("\n".join(rules).replace("PASSWORD_SHA256", digest) + "\n")


def _answers(store: Store) -> bool:
    try:
        return store.run(("PING",)) == [b"PONG"]
    except BrokerUnavailable:
        return False


@pytest.fixture(scope="module")
def secure_store(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Redis that speaks TLS only, asks for a certificate, and knows the user of deploy/redis/users.acl only."""
    folder, port = tmp_path_factory.mktemp("secure"), free_port()
    cert, key = certificate(authority, "store")
    _write_rules(folder)
    options = f"--port 0 --tls-port {port} --tls-cert-file {cert} --tls-key-file {key} --tls-auth-clients yes"
    options += (
        f" --tls-ca-cert-file {authority}/ca.crt --aclfile {folder}/users.acl --bind 127.0.0.1 --save  --dir {folder}"
    )
    process = subprocess.Popen(["redis-server", *options.split(" ")], stdout=subprocess.DEVNULL)
    yield port
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="module")
def secure(secure_store: int, authority: Path) -> GatewaySettings:
    """Settings as an operator gives them."""
    cert, key = certificate(authority, "noria")
    settings = GatewaySettings(
        NORIA_REDIS_PASSWORD=PASSWORD,
        NORIA_REDIS_TLS_CA=str(authority / "ca.crt"),
        NORIA_REDIS_TLS_CERT=cert,
        NORIA_REDIS_TLS_KEY=key,
        redis_url=f"rediss://noria@127.0.0.1:{secure_store}/0",
    )

    eventually(lambda: _answers(Store(settings.redis_url)))
    return settings


def test_all_goes_over_tls_with_the_least_rights(secure, launch):
    engine = launch.engine(secure.redis_url)
    gateway = launch.gateway(secure.redis_url, key_pepper="p" * 32)
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 60, "stream": True}
        answer = client.post("/v1/completions", json=body, headers={"x-noria-resumable": "true"})
        assert answer.text.strip().endswith("[DONE]")
        kept = client.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"}).json()
        assert client.get(f"/v1/files/{kept['id']}/content").content == b"{}"
        assert client.delete(f"/v1/files/{kept['id']}").json()["deleted"]
        response = client.post("/v1/responses", json={"model": "tiny", "input": "Hello"}).json()
        assert client.get(f"/v1/responses/{response['id']}").json()["status"] == "completed"
    assert not engine.running


@pytest.mark.parametrize(
    "command",
    [("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("GET", "other"), ("REPLICAOF", "NO", "ONE")],
)
def test_more_is_refused(secure, command):
    store = Store(secure.redis_url)
    with pytest.raises(BrokerUnavailable, match=r"NOPERM|permission"):
        store.run(command)
    store.close()


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_old_and_new_servers_read_the_rules(kind, tmp_path):
    """WAITAOF is not known to Redis 7.0, and what newer ones have, changes to tenants wait with."""
    port = free_port()
    _write_rules(tmp_path)
    options = f"--port {port} --aclfile {tmp_path}/users.acl --appendonly yes --bind 127.0.0.1 --save  --dir {tmp_path}"
    process = subprocess.Popen([find_binary(kind), *options.split(" ")], stdout=subprocess.DEVNULL)
    store = Store(f"redis://noria:{PASSWORD}@127.0.0.1:{port}/0")
    try:
        eventually(lambda: process.poll() is None and _answers(store))
        (version,) = (
            line for line in store.run(("INFO",))[0].decode().splitlines() if line.startswith("redis_version")
        )
        if version >= "redis_version:7.2":
            assert store.run(("SET", "noria:x", 1), ("WAITAOF", 1, 0, 5000))[1] == [1, 0]
        for refused in (("CLIENT", "LIST"), ("CLIENT", "PAUSE", 1), ("ACL", "LIST"), ("MODULE", "LIST")):
            with pytest.raises(BrokerUnavailable, match=r"NOPERM|no permissions"):
                store.run(refused)
    finally:
        store.close()
        process.terminate()
        process.wait(10)


def test_a_store_that_nobody_vouches_for_is_not_talked_to(secure, secure_store, authority):
    for url in (f"rediss://noria:{PASSWORD}@127.0.0.1:{secure_store}/0", f"redis://127.0.0.1:{secure_store}/0"):
        with pytest.raises(BrokerUnavailable):
            Store(url).run(("PING",))
    other = secure.redis_url.replace("ca.crt", "noria.crt")
    with pytest.raises(BrokerUnavailable, match=r"(?i)certificate"):
        Store(other).run(("PING",))


def test_files_without_tls_are_a_mistake(monkeypatch):
    monkeypatch.setenv("NORIA_REDIS_TLS_CA", "/ca.crt")
    with pytest.raises(ValueError, match=r"does not begin with rediss"):
        GatewaySettings(redis_url="redis://h")
    assert GatewaySettings(redis_url="rediss+sentinel://h/m").redis_url == "rediss+sentinel://h/m?ssl_ca_certs=/ca.crt"


def peer(port: int, authority: Path) -> bytes:
    """The certificate that the gateway shows, once it has been found to be good."""
    context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
    pem = ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(authority / "ca.crt"))
    assert context.verify_mode is ssl.CERT_REQUIRED
    return ssl.PEM_cert_to_DER_cert(pem)


def test_https_at_the_gateway_and_a_new_certificate_without_a_restart(
    store_url, engine, own_port, authority, tmp_path, launch, monkeypatch
):
    shutil.copy(certificate(authority, "gateway")[0], tmp_path / "tls.crt")
    shutil.copy(authority / "gateway.key", tmp_path / "tls.key")
    monkeypatch.setenv("NORIA_GATEWAY_TLS_CERT", str(tmp_path / "tls.crt"))
    monkeypatch.setenv("NORIA_GATEWAY_TLS_KEY", str(tmp_path / "tls.key"))
    running = Process(tmp_path, own_port, store_url)
    url = f"https://127.0.0.1:{own_port}"
    try:
        context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
        running.client = httpx.Client(base_url=url, verify=context, timeout=20)
        launch.eventually(running.ready, 60)
        assert running.ask(stream=True).text.strip().endswith("[DONE]")
        assert probe(f"{url}/healthz") == ""
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{own_port}/healthz")
        old = peer(own_port, authority)
        (tmp_path / "tls.crt").write_text("no certificate")
        running.process.send_signal(signal.SIGHUP)
        launch.eventually(lambda: running.said("settings cannot be used; nothing has changed"))
        assert peer(own_port, authority) == old
        shutil.copy(certificate(authority, "renewed")[0], tmp_path / "tls.crt")
        shutil.copy(authority / "renewed.key", tmp_path / "tls.key")
        running.process.send_signal(signal.SIGHUP)
        launch.eventually(lambda: peer(own_port, authority) != old)
        assert running.ask().status_code == 200
    finally:
        running.process.terminate()
        assert running.process.wait(20) == 0


def test_a_key_that_does_not_belong_is_one_clear_line(authority, own_port, tmp_path, monkeypatch, store_url):
    cert, key = certificate(authority, "one")[0], certificate(authority, "two")[1]
    monkeypatch.setenv("NORIA_GATEWAY_TLS_CERT", cert)
    monkeypatch.setenv("NORIA_GATEWAY_TLS_KEY", key)
    running = Process(tmp_path, own_port, store_url)
    assert running.process.wait(60) == 2
    (line,) = running.log_path.read_text().splitlines()
    assert line.startswith("noria gateway: cannot speak HTTPS with") and cert in line


def test_one_without_the_other_is_refused():
    with pytest.raises(ValueError, match="together"):
        GatewaySettings(tls_cert="a")


def test_the_rules_are_those_that_redis_reads(secure_store, secure):
    with redis.Redis.from_url(secure.redis_url) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.acl_list()
