"""`noria serve` as a person meets it: on a terminal, and when what it is asked to serve is broken."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from noria.banner import ready_text
from noria.embedded_store import open_store
from noria.engine.models.source import resolve
from noria.serve import CannotStart, _Address, _free_port, _kept_key

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0
SMALL = ("--port", "0", "--kv-memory", "64MiB")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "noria", "serve", *arguments]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **variables}


def processes_of(marker: str) -> list[tuple[int, str]]:
    """Living processes whose environment or arguments hold `marker`."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            arguments = (folder / "cmdline").read_bytes()
            if marker.encode() in arguments + (folder / "environ").read_bytes():
                found.append((int(folder.name), arguments.replace(b"\0", b" ").decode()))
        except OSError:
            continue
    return found


class OnATerminal:
    """A `noria serve` in the foreground of a pseudo-terminal."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        pid, self.fd = pty.fork()
        if pid == 0:
            os.execvpe(sys.executable, command(*arguments), environment(**variables))
        self.pid = pid
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self.output = ""

    def read_until(self, condition: Callable[[str], object]) -> None:
        give_up = time.monotonic() + DEADLINE
        while not condition(self.output):
            assert time.monotonic() < give_up, self.output
            if select.select([self.fd], [], [], 0.2)[0]:
                assert self._read(), self.output

    def _read(self) -> bool:
        """False once no process holds the terminal any more."""
        try:
            chunk = os.read(self.fd, 65536)
        except OSError as error:
            assert error.errno == errno.EIO
            return False
        self.output += chunk.decode(errors="replace")
        return bool(chunk)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        """The exit code, once the last process has let go of the terminal."""
        give_up = time.monotonic() + DEADLINE
        while self._read():
            assert time.monotonic() < give_up, self.output
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_on_a_terminal_from_loading_bar_to_ctrl_c(tmp_path: Path) -> None:
    state = tmp_path / "state"
    serve = OnATerminal(*SMALL, "--state-dir", str(state), "--max-batch-size", "8", NORIA_MARK=str(tmp_path))
    try:
        serve.read_until(lambda output: "print(answer" in output)
        assert "Loading smollm2-135m-instruct" in serve.output
        assert re.search(r"engine \| .*serving", serve.output)
        assert re.search(r"gateway \| ", serve.output)
        assert '"event":' not in serve.output  # text for people
        key = (state / "api-key").read_text().strip()
        assert f"API key    {key}" in serve.output
        arguments = [line for _, line in processes_of(str(tmp_path))]
        assert any(" -m noria engine --max-batch-size=8 --kv-memory=64MiB" in line for line in arguments), arguments
        assert any(" -m noria gateway --port=" in line for line in arguments), arguments
        assert any("valkey-server" in line for line in arguments), arguments
        assert not any(key in line for line in arguments)
        serve.type("\x03")
        assert serve.wait() == 0
    finally:
        for pid, _ in processes_of(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)
    assert "Traceback" not in serve.output
    assert processes_of(str(tmp_path)) == []


def test_a_killed_serve_leaves_no_orphan_and_no_stale_lock(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    marked = environment(NORIA_MARK=str(tmp_path))
    arguments = command(*SMALL, "--state-dir", state)
    first = subprocess.Popen(arguments, env=marked, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    try:
        for line in first.stderr:
            if '"listening"' in line:
                break
        roles = " ".join(line for _, line in processes_of(str(tmp_path)))
        assert "noria engine" in roles and "noria gateway" in roles and "valkey-server" in roles
        second = subprocess.run(arguments, env=marked, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1 and f"process {first.pid}" in second.stderr
        first.kill()
        first.wait()
        give_up = time.monotonic() + 20
        while processes_of(str(tmp_path)):
            assert time.monotonic() < give_up, processes_of(str(tmp_path))
            time.sleep(0.05)
    finally:
        first.kill()
    os.close(open_store(Path(state)).lock_fd)  # nothing stale is in the way


def test_a_broken_gguf_ends_everything_with_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    demo = resolve("smollm2-135m-instruct").path
    with demo.open("rb") as whole:
        broken.write_bytes(whole.read(20_000))
    marked = environment(NORIA_MARK=str(tmp_path))
    done = subprocess.run(
        command(*SMALL, "--state-dir", str(tmp_path / "state"), str(broken)),
        env=marked,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    plain = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(plain) == 1 and "broken.gguf" in plain[0]
    assert processes_of(str(tmp_path)) == []


def test_the_generated_key_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    key, path = _kept_key(tmp_path / "state")
    assert re.fullmatch(r"sk-noria-[\w-]{32}", key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _kept_key(tmp_path / "state") == (key, path)
    shutil.rmtree(tmp_path / "state")
    assert _kept_key(tmp_path / "state")[0] != key


def test_a_free_port_is_found_and_a_bad_host_refused() -> None:
    port = _free_port("127.0.0.1", 0)
    assert 1024 <= port <= 65535
    assert _free_port("127.0.0.1", port) == port
    with pytest.raises(CannotStart, match="Cannot listen on no host:80"):
        _free_port("no host", 80)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("::", "http://[::1]:8000/v1"),
        ("example.test", "http://example.test:8000/v1"),
    ],
)
def test_the_base_url_can_be_called(host: str, url: str) -> None:
    assert _Address(host, 8000).base_url == url


def test_the_ready_text_runs_as_it_is_printed() -> None:
    text = ready_text("http://127.0.0.1:8000/v1", "demo", "sk-noria-x", "/state/api-key")
    curl, snippet = text.split("curl ")[1].split("from openai")
    assert subprocess.run(["bash", "-n"], input=f"curl {curl}", text=True, check=False).returncode == 0
    compile(f"from openai{snippet}", "snippet", "exec")
    assert 'api_key="sk-noria-x"' in snippet


def test_a_key_that_was_given_is_not_repeated() -> None:
    text = ready_text("http://127.0.0.1:8000/v1", "demo", None, "/state/api-key")
    assert "YOUR_KEY" in text and "as given" in text and "None" not in text
