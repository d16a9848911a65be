"""`noria doctor` names each planted misconfiguration and its cure."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from bench.store import find_binary, running_store
from noria.doctor import Finding, doctor, fail, ok, warn
from noria.doctor_checks import all_checks
from noria.embedded_store import open_store
from noria.engine.config import EngineConfig
from noria.engine.wire.settings import Settings
from noria.engine_checks import check_engine
from noria.gateway.config import GatewaySettings
from noria.kept_settings import keep, kept
from noria.kernels.cpu import library
from noria.machine_checks import check_door, check_limits, check_settings
from noria.store_checks import check_store

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("NORIA_"):
            monkeypatch.delenv(name)


def found(findings: Iterator[Finding], check: str) -> Finding:
    """The finding of that check, which is there once; what is wrong has a cure."""
    every = list(findings)
    assert all(bool(finding.cure) == (finding.level != "ok") for finding in every)
    (one,) = [finding for finding in every if finding.check == check]
    return one


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    port = _free_port()
    command = [
        find_binary(),
        "--port",
        str(port),
        "--dir",
        str(folder),
        "--save",
        "",
        "--loglevel",
        "warning",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _until_open(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _until_open(port: int) -> None:
    until = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


# --- the store --------------------------------------------------------------------------------------------------------


def test_no_store() -> None:
    seen = found(check_store(f"redis://127.0.0.1:{_free_port()}/0"), "store")
    assert seen.level == "fail" and "cannot be reached" in seen.said and "NORIA_REDIS_URL" in seen.cure


def test_another_password(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "right") as url:
        for wrong in (url, url.replace("//", "//:wrong@")):
            seen = found(check_store(wrong), "store")
            assert seen.level == "fail" and "password" in seen.said and "NORIA_REDIS_PASSWORD_FILE" in seen.cure
            assert "wrong@" not in seen.said
        assert found(check_store(url.replace("//", "//:right@")), "store").level == "ok"


def test_a_store_that_evicts_forgets_and_has_no_bound(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory-policy", "allkeys-lru", "--appendonly", "no") as url:
        eviction = found(check_store(url), "store eviction")
        assert eviction.level == "fail" and "allkeys-lru" in eviction.said and "noeviction" in eviction.cure
        durability = found(check_store(url), "store durability")
        assert durability.level == "fail" and "CONFIG SET appendonly yes" in durability.cure
        memory = found(check_store(url), "store memory")
        assert memory.level == "warn" and "maxmemory" in memory.cure


def test_a_replica(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--replicaof", "127.0.0.1", "1") as url:
        seen = found(check_store(url), "store role")
        assert seen.level == "fail" and "replica" in seen.said and "primary" in seen.cure


def test_a_store_as_it_should_be(tmp_path: Path) -> None:
    with redis_server(
        tmp_path, "--appendonly", "yes", "--maxmemory", "64mb", "--maxmemory-policy", "noeviction"
    ) as url:
        assert {finding.level for finding in check_store(url)} == {"ok"}


class _OldStore(threading.Thread):
    """Speaks the protocol, and is of another version and another time than a real one would be."""

    def __init__(self, version: str, ahead: float) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._info = f"# Server\r\nredis_version:{version}\r\nrole:master\r\nused_memory:1048576\r\n".encode()
        self._ahead = ahead

    def run(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as lines:
                while head := lines.readline():
                    words = [lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]
                    connection.sendall(self._reply(words))

    def _reply(self, words: list[bytes]) -> bytes:
        match [word.upper() for word in words]:
            case [b"PING"]:
                return b"+PONG\r\n"
            case [b"INFO", *_]:
                return b"$%d\r\n%s\r\n" % (len(self._info), self._info)
            case [b"TIME"]:
                now = time.time() + self._ahead
                return b"*2\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in (b"%d" % now, b"0"))
            case [b"CONFIG", *_]:
                return b"-NOPERM this user has no permissions to run the 'config|get' command\r\n"
        return b"+OK\r\n"

    def close(self) -> None:
        self._listener.close()


def test_an_old_store_with_another_clock_that_tells_no_settings() -> None:
    store = _OldStore("6.2.14", ahead=90)
    store.start()
    every = {finding.check: finding for finding in check_store(store.url)}
    store.close()
    assert every["store version"].level == "fail" and "Redis 7" in every["store version"].cure
    assert every["clock"].level == "fail" and "89" <= every["clock"].said.split("is ")[1][:2] <= "90"
    assert "ahead" in every["clock"].said and "timedatectl" in every["clock"].cure
    assert every["store settings"].level == "warn" and "noeviction" in every["store settings"].cure


# --- settings, doors, limits ------------------------------------------------------------------------------------------


def test_a_variable_that_nobody_reads_and_a_value_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(check_settings({}), "settings").level == "ok"
    monkeypatch.setenv("NORIA_GATEWAY_PROT", "8001")
    seen = found(check_settings({}), "settings")
    assert seen.level == "warn" and "did you mean NORIA_GATEWAY_PORT?" in seen.said
    monkeypatch.delenv("NORIA_GATEWAY_PROT")
    monkeypatch.setenv("NORIA_ENGINE_POLICY", "pagd")
    seen = found(check_settings({}), "settings")
    assert seen.level == "fail" and "NORIA_ENGINE_POLICY" in seen.said


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        seen = found(check_door(GatewaySettings(port=taken.getsockname()[1])), "port")
    assert seen.level == "fail" and "--port" in seen.cure
    with socket.create_server(("127.0.0.1", 0)) as taken:
        seen = found(check_door(GatewaySettings(port=0, metrics_port=taken.getsockname()[1])), "metrics port")
    assert seen.level == "fail" and "--metrics-port" in seen.cure


def test_an_open_door() -> None:
    seen = found(check_door(GatewaySettings(host="0.0.0.0", port=0, api_key=SecretStr(""))), "keys")
    assert seen.level == "fail" and "everybody" in seen.said and "NORIA_API_KEY" in seen.cure
    assert found(check_door(GatewaySettings(port=0)), "keys").level == "ok"
    kept = check_door(GatewaySettings(host="0.0.0.0", port=0, api_key=SecretStr("")), of_serve=True)
    assert found(kept, "keys").level == "ok"


def test_too_few_files(tmp_path: Path) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
        "from pathlib import Path; from noria.machine_checks import check_limits;"
        f"print([f for f in check_limits(Path({str(tmp_path)!r})) if f.level == 'warn'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "256 at most" in done.stdout and "ulimit -n" in done.stdout


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_cut_short(tmp_path: Path) -> Path:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00\x01")
    return path


def test_a_model_that_is_not_there_or_cut_short(gguf_cut_short: Path) -> None:
    seen = found(check_engine(EngineConfig(model="/no/such/model.gguf")), "model")
    assert seen.level == "fail" and "no such file" in seen.said and "noria models" in seen.cure
    assert found(check_engine(EngineConfig(model=str(gguf_cut_short))), "model").level == "fail"


def test_an_adapter_that_is_not_there() -> None:
    seen = found(check_engine(EngineConfig(model="/no/such/model.gguf", lora="sql=/no/such/adapter")), "adapter")
    assert seen.level == "fail" and "/no/such/adapter/adapter_config.json" in seen.said and "lora.md" in seen.cure


def test_too_little_memory() -> None:
    seen = found(check_engine(EngineConfig(kv_memory="4TiB")), "memory")
    assert seen.level == "fail" and "TiB" in seen.said.replace("GiB", "TiB") and "--kv-memory" in seen.cure


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = found(check_engine(EngineConfig(kernels="torch")), "kernels")
    assert seen.level == "warn" and "no C compiler" in seen.said and "gcc" in seen.cure


def test_more_threads_than_processors() -> None:
    seen = found(check_engine(EngineConfig(threads=512)), "processors")
    assert seen.level == "warn" and "--threads" in seen.cure


# --- the command ------------------------------------------------------------------------------------------------------


def noria_doctor(*arguments: str, max_files: int = 8192, **variables: str) -> tuple[int, dict[str, Any]]:
    """Its exit code and findings, with `variables` as the whole of Noria's environment."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
    command = ["/bin/sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh", sys.executable, "-m", "noria", "doctor"]
    command += ["--json", *arguments]
    done = subprocess.run(command, env={**others, "PYTHONPATH": str(ROOT), **variables}, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_the_command_tells_good_from_bad(tmp_path: Path) -> None:
    port = {"NORIA_GATEWAY_PORT": str(_free_port())}
    with running_store() as store:
        code, seen = noria_doctor("--state-dir", str(tmp_path), NORIA_REDIS_URL=store.url, **port)
        assert code == 0, seen
        assert {seen[check]["level"] for check in ("settings", "store", "clock", "model", "memory", "port")} == {"ok"}


def test_ten_mistakes_at_once_are_each_named_with_their_cure(tmp_path: Path) -> None:
    bad_pair = {"NORIA_GATEWAY_TLS_CERT": str(tmp_path / "no.crt"), "NORIA_GATEWAY_TLS_KEY": str(tmp_path / "no.key")}
    with redis_server(tmp_path, "--maxmemory-policy", "allkeys-lru", "--appendonly", "no") as url, _taken() as port:
        code, seen = noria_doctor(
            "--state-dir", "/proc/nowhere",
            NORIA_REDIS_URL=url, NORIA_GATEWAY_PROT="8001", NORIA_GATEWAY_HOST="0.0.0.0", NORIA_GATEWAY_PORT=str(port),
            NORIA_ENGINE_MODEL="/no/such.gguf", NORIA_ENGINE_THREADS="512", max_files=256, **bad_pair,
        )  # fmt: skip
    planted = {
        "settings": "NORIA_GATEWAY_PROT", "open files": "ulimit -n", "state folder": "--state-dir", "port": "--port",
        "keys": "NORIA_API_KEY", "certificate": "--tls-cert", "store eviction": "noeviction",
        "store durability": "appendonly yes", "store memory": "maxmemory", "model": "noria models",
        "processors": "--threads",
    }  # fmt: skip
    assert code == 1 and len(planted) > 10
    for check, word in planted.items():
        assert seen[check]["level"] in ("warn", "fail") and seen[check]["cure"], check
        assert word in seen[check]["said"] + seen[check]["cure"], seen[check]
    assert {seen[check]["level"] for check in ("store", "store version", "clock")} == {"ok"}


@contextlib.contextmanager
def _taken() -> Iterator[int]:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_a_noria_serve_that_runs_is_looked_at_as_it_was_started(tmp_path: Path) -> None:
    port = _free_port()
    given = {"model": "/no/such.gguf", "port": port, "threads": 512}
    with running_embedded(tmp_path, EngineConfig(model="/no/such.gguf", threads=512), GatewaySettings(port=port)):
        assert kept(tmp_path) == given
        seen = {finding.check: finding for check in all_checks({}, tmp_path, check_engine) for finding in check()}
        assert seen["noria serve"].level == seen["store"].level == "ok"
        assert "such.gguf" in seen["model"].said and seen["processors"].level == "warn"
        assert str(port) in seen["port"].said
        chosen = {finding.check: finding for check in all_checks({"threads": 1}, tmp_path, None) for finding in check()}
        assert chosen["store"].level == "ok" and "engine" in chosen
    store = found((finding for check in all_checks({}, tmp_path, None) for finding in check()), "store")
    assert "no noria serve runs here" in store.said


@contextlib.contextmanager
def running_embedded(folder: Path, *settings: Settings) -> Iterator[None]:
    """The store that serve would run there, and what it keeps of its settings."""
    store = open_store(folder)
    keep(folder, *settings)
    process = subprocess.Popen(store.argv, stdout=subprocess.DEVNULL, pass_fds=[store.lock_fd])
    os.close(store.lock_fd)
    try:
        until = time.monotonic() + 10
        while not store.answers():
            assert time.monotonic() < until
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(10)


def test_it_is_shown_to_people_with_the_cure_beneath(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [ok("one", "fine [x]"), warn("two", "so so", "do this"), fail("three", "bad", "do that")]
    assert doctor([lambda: findings[:2]], as_json=False) == 0
    assert doctor([lambda: findings[:1], lambda: findings[2:]], as_json=False) == 1
    shown = capsys.readouterr().out
    assert (
        "fine [x]" in shown
        and "→ do this" in shown
        and "→ do that" in shown
        and "1 fine, 0 to look at, 1 to mend" in shown
    )


def test_without_settings_that_can_be_read_the_rest_waits() -> None:
    checks = all_checks({"policy": "none"}, None, check_engine)
    assert len(checks) == 2
    assert any(finding.level == "fail" for finding in checks[0]())
    assert all(check_limits(Path("/tmp")))
