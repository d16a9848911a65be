"""Noria and other servers side by side, in one run, under one load generator.

    python -m bench.peers                                     # all peers, three rounds
    python -m bench.peers --peers noria llamacpp openvino --rounds 3
    python -m bench.peers --minutes 3                         # stops there; the same command goes on
    python -m bench.peers --show                              # print what was measured

Every peer runs the demo model with two compute threads in an environment of its own, made at first use from the package
index. All servers stay up; each measure of each round asks them one after the other, in a new order, so that whatever
disturbs the machine disturbs all alike. What cannot be installed or does not start is said to be absent. Each run is
kept in `--state` as it ends; a new measurement needs a new file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.peers.catalogue import KEY, PEERS, Launch, Peer
from bench.peers.environments import Absent, prepare
from bench.peers.measures import MEASURES, Measure, run, words
from bench.peers.report import tables
from bench.peers.running import Failed, Running, free_port
from noria.load import LoadError, Prompts, Target
from noria.tables import console

MIB = 2**20


class Side:
    """One peer that runs, and how to ask it."""

    def __init__(self, peer: Peer, folder: Path, state: Path, threads: int) -> None:
        """Raises Absent and Failed."""
        launch = Launch(prepare(peer, folder), folder / "models", state, free_port(), threads)
        environment = {"OMP_NUM_THREADS": str(threads), "NORIA_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
        log = folder / f"{peer.name}.log"
        self.peer = peer
        self.server = Running(peer.command(launch), launch.port, peer.ready, environment, log)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        self.target = Target(
            f"http://127.0.0.1:{launch.port}/v1", peer.model(launch), chat=False, headers=headers, extra=peer.extra
        )
        self.prompts: Prompts | None = None

    def measure(self, measure: Measure, seed: str) -> dict[str, Any]:
        try:
            if self.prompts is None:
                self.prompts = asyncio.run(words(self.target))
            return asyncio.run(run(measure, self.target, replace(self.prompts, seed=seed), self.server))
        except LoadError as error:
            return {"failed": 1, "errors": [str(error)]}


def todo(state: dict[str, Any], peers: Sequence[str], rounds: int) -> Iterator[tuple[int, Measure, str]]:
    """What is left to measure. Who begins changes with every measure."""
    done = {(r["round"], r["measure"], r["peer"]) for r in state["runs"]}
    for number in range(rounds):
        for place, measure in enumerate(MEASURES):
            first = (number + place) % max(1, len(peers))
            for peer in (*peers[first:], *peers[:first]):
                if (number, measure.name, peer) not in done:
                    yield number, measure, peer


def measure_all(state: dict[str, Any], keep: Path, options: argparse.Namespace) -> bool:
    """Add runs to `state`, and keep it in a file after each. Returns whether all is measured."""
    until = time.monotonic() + 60 * options.minutes
    salt = secrets.token_hex(6)  # so that no prefix cache knows the words of an earlier run
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="noria-peers-")))
        sides = {}
        for peer in (peer for peer in PEERS if peer.name in options.peers):
            (scratch / peer.name).mkdir()
            try:
                side = Side(peer, options.folder, scratch / peer.name, options.threads)
            except (Absent, Failed) as error:
                state["absent"][peer.name] = str(error)
                print(f"{peer.name} is absent: {error}", file=sys.stderr, flush=True)
                continue
            stack.callback(side.server.stop)
            state["absent"].pop(peer.name, None)
            known = state["peers"].setdefault(peer.name, {"what": peer.what, "start_seconds": [], "memory_mib": []})
            known["start_seconds"].append(side.server.start_seconds)
            sides[peer.name] = side
        for number, measure, name in todo(state, list(sides), options.rounds):
            if time.monotonic() > until:
                return False
            found = sides[name].measure(measure, f"{salt}/{number}/{measure.name}")
            state["runs"].append({"round": number, "measure": measure.name, "peer": name, **found})
            state["peers"][name]["memory_mib"].append(sides[name].server.memory() / MIB)
            keep.write_text(json.dumps(state, indent=1) + "\n")
            said = found["errors"] if "errors" in found else f"{found['value']:.3g} {measure.unit}"
            print(f"round {number + 1}, {measure.name}: {name} {said}", file=sys.stderr, flush=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each server")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="measure no longer; installing counts too")
    parser.add_argument("--folder", type=Path, default=Path("build/peers"), help="environments, weights, logs")
    parser.add_argument("--state", type=Path, help="runs as JSON; default: peers.json in the folder")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    keep = options.state or options.folder / "peers.json"
    state = json.loads(keep.read_text()) if keep.exists() else {"peers": {}, "absent": {}, "runs": []}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with all servers
    whole = options.show or measure_all(state, keep, options)
    for table in tables(state):
        console().print(table)
        print()
    print("medians; in parentheses how many times as well, or as cheaply, Noria did it")
    if not whole:
        print("not all is measured: the same command goes on", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
