"""The supervisor with real child processes: small stand-ins for the roles, in shell and Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from noria import supervisor
from noria.child import ChildSpec
from noria.supervisor import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_KILLED, Supervisor

DEADLINE = 15.0


def eventually(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up, f"not within {DEADLINE} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def child(name: str, code: str, *, stop_seconds: float = 5.0, **more: object) -> ChildSpec:
    argv = [sys.executable, "-u", "-c", textwrap.dedent(code)]
    return ChildSpec(name, argv, dict(os.environ), stop_seconds, **more)  # type: ignore[arg-type]


SLEEPER = """
    import os, pathlib, signal, sys, time
    def stop(*_):
        with open({log!r}, "a") as f: f.write("{name} stopped\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    with open({log!r}, "a") as f: f.write("{name} " + str(os.getpid()) + "\\n")
    while True: time.sleep(0.02)
"""


class Log:
    """The file in which the stand-ins say what happens to them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sleeper(self, name: str, **more: object) -> ChildSpec:
        return child(name, SLEEPER.format(log=str(self.path), name=name), **more)  # type: ignore[arg-type]

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def pids(self, name: str) -> list[int]:
        return [int(line.split()[1]) for line in self.lines() if line.startswith(name) and line.split()[1].isdigit()]

    def stopped(self) -> list[str]:
        return [line.split()[0] for line in self.lines() if line.endswith("stopped")]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "events")


def run_until(specs: list[ChildSpec], condition: Callable[[], object], *, signals: int = 1) -> tuple[int, list[str]]:
    """Run the supervisor here and signal this process as soon as the condition holds."""
    said: list[str] = []
    give_up = time.monotonic() + DEADLINE
    sent = 0

    def tick() -> None:
        nonlocal sent
        if sent == 0 and (condition() or time.monotonic() > give_up):
            sent = 1
            os.kill(os.getpid(), signal.SIGTERM)
            if signals == 2:
                # The second one must come while the children are being stopped.
                subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -TERM {os.getpid()}"])

    code = Supervisor(specs, say=said.append, on_tick=tick, first_delay=0.05).run()
    assert time.monotonic() < give_up + DEADLINE
    return code, said


def test_stops_in_the_opposite_order_and_leaves_nothing(log: Log) -> None:
    names = ["store", "engine", "gateway"]
    code, said = run_until([log.sleeper(name) for name in names], lambda: all(log.pids(name) for name in names))
    assert code == 0
    assert said == []
    assert log.stopped() == ["gateway", "engine", "store"]
    assert not any(alive(pid) for name in names for pid in log.pids(name))


def test_a_hangup_that_reloads_reaches_those_that_reload_and_ends_nothing(log: Log) -> None:
    reloader = child(
        "gateway",
        f"""
        import signal, time
        def note(text): open({str(log.path)!r}, "a").write(text + "\\n")
        signal.signal(signal.SIGHUP, lambda *_: note("gateway reloaded"))
        note("gateway ready")
        while True: time.sleep(0.02)
        """,
        reloads=True,
        stop_seconds=0.1,
    )
    hung_up = 0

    def tick() -> None:
        nonlocal hung_up
        if not hung_up and "gateway ready" in log.lines() and any(line.startswith("engine") for line in log.lines()):
            os.kill(os.getpid(), signal.SIGHUP)
            hung_up = 1
        elif "gateway reloaded" in log.lines() and hung_up == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            hung_up = 2

    specs = [log.sleeper("engine"), reloader]
    assert Supervisor(specs, say=lambda _: None, on_tick=tick, hangup_reloads=True).run() == 0
    assert hung_up == 2 and log.stopped() == ["engine"]


def test_the_next_child_waits_until_the_one_before_is_ready(log: Log, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    asked = 0

    def is_ready() -> bool:
        nonlocal asked
        asked += 1
        if asked > 3:
            ready.touch()
        return ready.exists()

    look = f"import pathlib; assert pathlib.Path({str(ready)!r}).exists()\n" + textwrap.dedent(
        SLEEPER.format(log=str(log.path), name="engine")
    )
    specs = [log.sleeper("store", ready=is_ready), child("engine", look)]
    code, said = run_until(specs, lambda: log.pids("engine"))
    assert (code, said) == (0, [])
    assert log.pids("store") and log.pids("engine")


def test_a_killed_child_is_started_again_and_the_others_stay(log: Log) -> None:
    killed: list[int] = []

    def condition() -> bool:
        if log.pids("engine") and log.pids("gateway") and not killed:
            killed.append(log.pids("engine")[0])
            os.kill(killed[0], signal.SIGKILL)
        return len(log.pids("engine")) == 2

    code, said = run_until([log.sleeper("engine"), log.sleeper("gateway")], condition)
    assert code == 0
    assert said == ["engine ended (SIGKILL); starting it again in 0.05 s"]
    assert len(log.pids("gateway")) == 1


def test_delays_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_DELAY", 0.2)
    said: list[str] = []

    def tick() -> None:
        if len(said) >= 4:
            os.kill(os.getpid(), signal.SIGTERM)

    spec = ChildSpec("engine", ["sh", "-c", "exit 7"], dict(os.environ), 1.0)
    assert Supervisor([spec], say=said.append, on_tick=tick, first_delay=0.05).run() == 0
    delays = [line.split(" in ")[1] for line in said[:4]]
    assert delays == ["0.05 s", "0.1 s", "0.2 s", "0.2 s"]
    assert said[0].startswith("engine ended (exit code 7)")


def test_a_long_life_resets_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "HEALTHY_AFTER", 0.0)
    said: list[str] = []

    def tick() -> None:
        if len(said) >= 3:
            os.kill(os.getpid(), signal.SIGTERM)

    spec = ChildSpec("engine", ["sh", "-c", "exit 1"], dict(os.environ), 1.0)
    Supervisor([spec], say=said.append, on_tick=tick, first_delay=0.05).run()
    assert {line.split(" in ")[1] for line in said} == {"0.05 s"}


def test_a_configuration_error_ends_everything_with_its_code(log: Log) -> None:
    said: list[str] = []
    waiting = f"""
        import pathlib, sys, time
        while not pathlib.Path({str(log.path)!r}).exists(): time.sleep(0.02)
        sys.exit({EXIT_CONFIGURATION})
    """
    code = Supervisor([child("engine", waiting), log.sleeper("gateway")], say=said.append).run()
    assert code == EXIT_CONFIGURATION
    assert said == []  # the child's own line is the one that counts
    assert log.stopped() == ["gateway"]


def test_ending_before_being_ready_is_final_and_says_why(log: Log) -> None:
    said: list[str] = []
    spec = ChildSpec(
        "store",
        ["sh", "-c", "exit 1"],
        dict(os.environ),
        1.0,
        ready=lambda: False,
        last_words=lambda: "the file is broken",
    )
    assert Supervisor([spec, log.sleeper("engine")], say=said.append).run() == EXIT_FAILED
    assert said == ["store ended (exit code 1) before it was ready: the file is broken"]
    assert log.lines() == []


def test_a_missing_program_is_a_line() -> None:
    said: list[str] = []
    code = Supervisor([ChildSpec("store", ["/nowhere/server"], {}, 1.0)], say=said.append).run()
    assert code == EXIT_FAILED
    assert len(said) == 1 and said[0].startswith("store cannot be started")


DEAF = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open({log!r}, "a") as f: f.write("{name} " + str(os.getpid()) + "\\n")
    while True: time.sleep(0.02)
"""


def test_a_child_that_does_not_stop_is_killed_in_its_time(log: Log) -> None:
    deaf = child("gateway", DEAF.format(log=str(log.path), name="gateway"), stop_seconds=0.3)
    code, said = run_until([log.sleeper("engine"), deaf], lambda: log.pids("engine") and log.pids("gateway"))
    assert code == 0
    assert said == ["gateway did not end within 0.3 s: killed"]
    assert log.stopped() == ["engine"]
    assert not alive(log.pids("gateway")[0])


def test_a_second_signal_kills_at_once(log: Log) -> None:
    deaf = child("gateway", DEAF.format(log=str(log.path), name="gateway"), stop_seconds=60.0)
    began = time.monotonic()
    code, _ = run_until([log.sleeper("engine"), deaf], lambda: log.pids("engine") and log.pids("gateway"), signals=2)
    assert code == EXIT_KILLED
    assert time.monotonic() - began < 30
    assert not alive(log.pids("gateway")[0]) and not alive(log.pids("engine")[0])


def test_what_a_child_started_itself_goes_with_it(log: Log) -> None:
    rank = textwrap.dedent(DEAF.format(log=str(log.path), name="rank"))
    nested = f"""
        import subprocess, sys, time
        inner = subprocess.Popen([sys.executable, "-c", {rank!r}])
        while True: time.sleep(0.02)
    """
    run_until([child("engine", nested)], lambda: log.pids("rank"))
    eventually(lambda: not alive(log.pids("rank")[0]), "the grandchild is gone")


def test_lines_and_progress_are_handed_over_whole(log: Log) -> None:
    lines: list[str] = []
    progress: list[str] = []
    talker = """
        import os, sys
        with os.fdopen(int(os.environ["NORIA_PROGRESS_FD"]), "w") as pipe:
            pipe.write('{"done": 1, "total": 2}\\n{"done": 2,'); pipe.flush()
            pipe.write(' "total": 2}\\n')
        for i in range(20000): print(f"line {i}", file=sys.stderr)
        sys.stderr.write("no newline")
        sys.exit(2)
    """
    spec = child("engine", talker, on_progress=progress.append, on_error_line=lines.append)
    assert Supervisor([spec], say=lambda _: None).run() == EXIT_CONFIGURATION
    assert progress == ['{"done": 1, "total": 2}', '{"done": 2, "total": 2}']
    assert lines == [f"line {i}" for i in range(20000)] + ["no newline"]


@pytest.fixture
def apart(log: Log, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor in a process of its own, with an engine and a gateway."""
    program = tmp_path / "supervise.py"
    program.write_text(
        f"import os\nfrom noria.child import ChildSpec\nfrom noria.supervisor import Supervisor\n"
        f"def spec(name, argv): return ChildSpec(name, argv, dict(os.environ), 5.0)\n"
        f"specs = [spec('engine', {list(log.sleeper('engine').argv)!r}), "
        f"spec('gateway', {list(log.sleeper('gateway').argv)!r})]\n"
        f"raise SystemExit(Supervisor(specs, say=print).run())\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, program], env={**os.environ, "PYTHONPATH": str(root)})
    try:
        eventually(lambda: log.pids("engine") and log.pids("gateway"), "both children run")
        yield process
    finally:
        process.kill()
        process.wait()


def test_no_orphan_when_the_supervisor_is_killed(log: Log, apart: subprocess.Popen[bytes]) -> None:
    pids = log.pids("engine") + log.pids("gateway")
    assert all(alive(pid) for pid in pids)
    apart.kill()
    apart.wait()
    eventually(lambda: not any(alive(pid) for pid in pids), "the children died with it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_stop_signal_ends_it_cleanly(log: Log, apart: subprocess.Popen[bytes], number: signal.Signals) -> None:
    apart.send_signal(number)
    assert apart.wait(DEADLINE) == 0
    assert log.stopped() == ["gateway", "engine"]
