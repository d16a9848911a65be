"""The ledger under fire: gateways, engines and the store are killed and stopped under the streams of a limited key;
then every entry is compared with what its client was told.

    python -m bench.ledger --requests 60 --disturbances 10

Passes where each answer has exactly one entry with its client's tokens, no request has two, and nothing is reserved.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import redis

from bench.chaos import Answer, Client, Trouble, make_specs, repeated, run_all
from bench.cluster import Cluster, wait_until
from bench.tiny_model import make
from noria.gateway.tenancy.bootstrap import DEFAULT_PROJECT, bootstrap, opened
from noria.gateway.tenancy.directory import Actor
from noria.gateway.tenancy.names import DEFAULT_ORGANIZATION
from noria.gateway.tenancy.records import Limits

PEPPER = "pepper-of-the-bench-0123456789abcdef"
LIMITS = Limits(tokens_per_day=10**9, requests_per_day=10**9, concurrent_requests=10**6)


async def make_key(url: str) -> str:
    await bootstrap(url, PEPPER)
    async with opened(url, PEPPER) as administration:
        given = {"name": "bench", "limits": LIMITS}
        _, secret = await administration.create_key(Actor("cli", "bench"), DEFAULT_ORGANIZATION, DEFAULT_PROJECT, given)
        return secret.value


async def under_fire(cluster: Cluster, options: argparse.Namespace) -> tuple[list[Answer], Trouble]:
    """The requests over and over, until there were as many disturbances as asked for or the time is over."""
    key = await make_key(cluster.store_url)
    until = time.monotonic() + options.seconds
    client = Client(cluster, "ledger", until + options.seconds, key)
    trouble = Trouble(cluster, options.seed, options.disturbances, options.gap, options.away)
    troubling = asyncio.create_task(trouble.run())
    specs = make_specs(options.requests, options.seed, options.longest)
    try:
        answers = await run_all(client, repeated(specs, lambda: troubling.done() or time.monotonic() > until))
        if troubling.done():
            troubling.result()
        return answers, trouble
    finally:
        troubling.cancel()
        await asyncio.gather(troubling, return_exceptions=True)
        await client.close()


class Books:
    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=True, protocol=2)

    def is_at_rest(self) -> bool:
        return not self._open() and not self._unposted() and not self._running()

    def what_is_left(self) -> str:
        return f"reserved {self._open()}, not posted {self._unposted()}, running {self._running()}"

    def entries(self) -> list[dict[str, str]]:
        return [fields for _, fields in self._client.xrange(f"noria:{{{DEFAULT_ORGANIZATION}}}:ledger")]

    def held(self) -> float:
        keys = self._client.scan_iter("noria:{*}:meters:*")
        return sum(float(value.split()[2]) for key in keys for value in self._client.hgetall(key).values())

    def _open(self) -> int:
        return sum(1 for _ in self._client.scan_iter("noria:{*}:reservation:*"))

    def _running(self) -> int:
        return sum(1 for _ in self._client.scan_iter("noria:{ledger}:request:*"))

    def _unposted(self) -> int:
        return int(self._client.xlen("noria:{ledger}:ledger"))


def judge(answers: list[Answer], entries: list[dict[str, str]]) -> list[str]:
    """What is wrong; empty where the ledger says what clients were told."""
    faults = [f"{i} has {n} entries" for i, n in Counter(entry["id"] for entry in entries).items() if n > 1]
    by_id = {entry["id"]: entry for entry in entries}
    for answer in answers:
        if answer.problem or answer.error:
            faults.append(f"request {answer.spec.index}: {answer.problem or answer.error}")
            continue
        entry = by_id.get(answer.completion_id.removeprefix("cmpl-") + "-0")
        if entry is None:
            faults.append(f"request {answer.spec.index} ({answer.completion_id}) has no entry")
            continue
        told, kept = (answer.prompt_tokens, answer.completion_tokens), (int(entry["prompt"]), int(entry["output"]))
        if told != kept:
            faults.append(f"request {answer.spec.index}: the client was told {told}, the ledger says {kept}")
    return faults


def sums(answers: list[Answer], entries: list[dict[str, str]]) -> str:
    """What clients were told of their answers, and what the ledger has beside it: streams that were begun anew."""
    told = {a.completion_id.removeprefix("cmpl-") + "-0" for a in answers}
    mine = [e for e in entries if e["id"] in told]
    beside = [e for e in entries if e["id"] not in told]
    said = tuple(sum(getattr(a, f"{kind}_tokens") or 0 for a in answers) for kind in ("prompt", "completion"))
    kept = tuple(sum(int(e[field]) for e in mine) for field in ("prompt", "output"))
    anew = tuple(sum(int(e[field]) for e in beside) for field in ("prompt", "output"))
    return (
        f"clients were told of {said[0]} + {said[1]} tokens, the ledger has {kept[0]} + {kept[1]} for them; "
        f"{len(beside)} entries of streams that nobody saw the end of have {anew[0]} + {anew[1]}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="requests, over and over")
    parser.add_argument("--longest", type=int, default=200, help="output tokens of the longest request")
    parser.add_argument("--disturbances", type=int, default=10, help="disturbances")
    parser.add_argument("--gap", type=float, default=2.0, help="mean seconds between two disturbances")
    parser.add_argument("--away", type=float, default=4.0, help="seconds that the store is away")
    parser.add_argument("--seconds", type=float, default=120.0, help="nothing new after that")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="noria-tiny-") as folder:
        model = str(make(Path(folder) / "tiny"))
        sizes = ("--kv-memory=64MiB", "--max-model-len=1024", "--served-model-name=ledger")
        with Cluster(model, engine_options=sizes, environment={"NORIA_KEY_PEPPER": PEPPER}) as cluster:
            answers, trouble = asyncio.run(under_fire(cluster, options))
            cluster.revive()
            cluster.await_ready()
            books = Books(cluster.store_url)
            wait_until(books.is_at_rest, 90, books.what_is_left)
            entries = books.entries()
            faults = judge(answers, entries)
            if books.held():
                faults.append(f"{books.held():g} are reserved at rest")
    reasons = Counter(entry["reason"] for entry in entries)
    print("disturbances: " + (", ".join(f"{name} {n}" for name, n in sorted(trouble.counts.items())) or "none"))
    print(f"{len(answers)} answers, {len(entries)} entries: " + ", ".join(f"{n} {r}" for r, n in reasons.items()))
    print(f"streams cut off {sum(a.cut for a in answers)}, resumed {sum(a.resumed for a in answers)}")
    print(sums(answers, entries))
    print("\n".join(faults) or "the ledger says what clients were told")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
