"""Two gateways, two engines and a store with an append-only file, killed and stopped at random while they stream.

    python -m bench.chaos --requests 200 --disturbances 12 --seed 1

The requests run once undisturbed, then again while processes get SIGKILL or SIGSTOP at random times, and further times
until all disturbances were made: a fast machine has as many as a slow one. Every request has to end exactly once, with
the undisturbed run's text byte for byte and the same usage, or with one honest error event. What was seen of a stream
that a dead gateway cut off has to be the beginning of that text; the client goes on with it at another gateway
(Last-Event-ID), or sends the request anew.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import orjson

from bench.cluster import KEY, Cluster, Gateway, Part
from bench.tiny_model import make
from noria.engine.wire.queue_view import QueueView

CONCURRENCY = 16
SILENCE = 60.0  # seconds without a byte after which a stream hangs
WORDS = ("river", "wheel", "bucket", "water", "mill", "stone", "turn", "lift", "field", "morning", "well", "rope")


@dataclass(frozen=True)
class Spec:
    """One request; the same seed makes the same ones."""

    index: int
    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self, model: str) -> dict[str, object]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass
class Answer:
    """What one client saw. `problem` names what must not happen."""

    spec: Spec
    text: str = ""
    completion_tokens: int | None = None
    ends: int = 0
    error: str = ""  # the error event that ended it
    problem: str = ""
    event_id: str = ""
    completion_id: str = ""
    prompt_tokens: int | None = None
    is_open: bool = False  # its stream has begun
    cut: int = 0  # streams that broke off
    resumed: int = 0
    refused: int = 0  # answers 503 and 429
    pieces: list[str] = field(default_factory=list)  # what was seen of streams that were begun anew


def make_specs(count: int, seed: int, longest: int) -> list[Spec]:
    """Half greedy, half sampled; short and long ones mixed."""
    chance = random.Random(seed)
    return [
        Spec(
            index,
            f"{index}: " + " ".join(chance.choices(WORDS, k=chance.randint(2, 40))),
            chance.randint(longest // 10, longest),
            0.0 if index % 2 else 0.9,
            1000 + index,
        )
        for index in range(count)
    ]


class Client:
    """Sends requests and lives through the death of gateways as a careful client would."""

    def __init__(self, cluster: Cluster, model: str, deadline: float, key: str = KEY) -> None:
        self._gateways: list[Gateway] = cluster.gateways
        self._model = model
        self._deadline = deadline  # monotonic
        self._chance = random.Random(7)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"}, timeout=httpx.Timeout(SILENCE, connect=5), limits=_NO_LIMITS
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def complete(self, spec: Spec) -> Answer:
        """Run one request to its end."""
        answer = Answer(spec)
        turn = self._chance.randrange(len(self._gateways))
        while not answer.ends and not answer.problem:
            if time.monotonic() > self._deadline:
                answer.problem = "did not end in time"
                break
            gateway = self._gateways[turn % len(self._gateways)]
            turn += 1
            try:
                await self._stream(gateway.url, answer)
            except httpx.ReadTimeout:
                answer.problem = f"nothing came for {SILENCE:g} s"
            except httpx.TransportError:
                pass
            if not answer.ends and not answer.problem:
                answer.cut += answer.is_open
                answer.is_open = False
                self._begin_again(answer)
                await asyncio.sleep(self._chance.uniform(0.1, 0.4))
        return answer

    async def _stream(self, url: str, answer: Answer) -> None:
        headers = {"X-Noria-Resumable": "true"}
        if answer.event_id:
            headers["Last-Event-ID"] = answer.event_id
        body = answer.spec.body(self._model)
        async with self._http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status_code in (429, 503):
                if "retry-after" not in response.headers:
                    answer.problem = f"{response.status_code} without Retry-After"
                answer.refused += 1
                return
            if answer.event_id and response.status_code in (404, 409, 410):
                answer.event_id = ""  # what could be resumed is gone: begin anew
                return
            if response.status_code != 200:
                answer.problem = f"status {response.status_code}: {(await response.aread())[:300]!r}"
                return
            answer.is_open = True
            answer.resumed += bool(answer.event_id)
            async for line in response.aiter_lines():
                self._read(line, answer)
                if answer.ends > 1:
                    answer.problem = "ended twice"

    def _read(self, line: str, answer: Answer) -> None:
        if line.startswith("id:"):
            answer.event_id = line[3:].strip()
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            answer.ends += 1
            return
        event = orjson.loads(data)
        if "error" in event:
            answer.ends += 1
            answer.error = f"{event['error']['code']}: {event['error']['message']}"
            return
        answer.completion_id = event["id"]
        for choice in event["choices"]:
            answer.text += choice["text"]
        if event.get("usage"):
            answer.completion_tokens = event["usage"]["completion_tokens"]
            answer.prompt_tokens = event["usage"]["prompt_tokens"]

    def _begin_again(self, answer: Answer) -> None:
        if not answer.event_id and answer.text:
            answer.pieces.append(answer.text)
            answer.text = ""


_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class Trouble:
    """Disturbs one process at a time, so that a request meets more than one death only by bad luck. `planned`: how many
    times. `gap`: mean seconds between two. `away`: seconds that the store is killed or stopped for."""

    def __init__(self, cluster: Cluster, seed: int, planned: int, gap: float, away: float) -> None:
        self._cluster = cluster
        self._chance = random.Random(seed)
        self._planned = planned
        self._gap = gap
        self._away = away
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        bag: list[tuple[Part, bool]] = []  # every process once by each signal, in random order, before any comes again
        for _ in range(self._planned):
            await asyncio.sleep(self._chance.uniform(self._gap / 2, self._gap * 1.5))
            if not bag:
                bag = [(part, kill) for part in self._cluster.parts for kill in (True, False)]
                self._chance.shuffle(bag)
            self._cluster.revive()
            part, kill = bag.pop()
            await (self._kill(part) if kill else self._pause(part))

    async def _kill(self, part: Part) -> None:
        self._count("SIGKILL", part)
        part.kill()
        try:
            await asyncio.sleep(self._away if part is self._cluster.store else self._chance.uniform(0.2, 1.0))
        finally:
            part.start()
        await self._until_back(part)

    async def _pause(self, part: Part) -> None:
        """An engine sleeps through its lease."""
        self._count("SIGSTOP", part)
        part.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._away if part is self._cluster.store else self._chance.uniform(2.5, 4.0))
        finally:
            part.send(signal.SIGCONT)

    async def _until_back(self, part: Part) -> None:
        until = time.monotonic() + 60
        while not await asyncio.to_thread(part.is_ready) and time.monotonic() < until:
            await asyncio.sleep(0.1)

    def _count(self, name: str, part: Part) -> None:
        self.counts[f"{name} {part.name.rstrip('0123456789')}"] += 1


async def run_all(client: Client, specs: Iterable[Spec]) -> list[Answer]:
    """A few at a time; answers in the order of the specs, which may be made while others run."""
    feed, answers = iter(enumerate(specs)), dict[int, Answer]()

    async def work() -> None:
        for place, spec in feed:
            answers[place] = await client.complete(spec)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return [answers[place] for place in range(len(answers))]


def repeated(specs: list[Spec], enough: Callable[[], bool]) -> Iterator[Spec]:
    """All of them once, then over again until `enough`."""
    yield from specs
    yield from itertools.takewhile(lambda _: not enough(), itertools.cycle(specs))


def judge(answer: Answer, expected: Answer) -> str:
    """What is wrong with an answer; empty where it is as it must be."""
    if answer.problem:
        return answer.problem
    for seen in (*answer.pieces, answer.text):
        if not expected.text.startswith(seen):
            place = next((i for i, (a, b) in enumerate(zip(seen, expected.text, strict=False)) if a != b), -1)
            return f"text differs at {place}: {seen[place : place + 40]!r}, not {expected.text[place : place + 40]!r}"
    if answer.error:
        return ""
    if answer.text != expected.text:
        return f"text ends after {len(answer.text)} of {len(expected.text)} characters"
    if answer.completion_tokens != answer.spec.max_tokens or answer.completion_tokens != expected.completion_tokens:
        return f"usage {answer.completion_tokens}, undisturbed {expected.completion_tokens}"
    return ""


async def chaos(cluster: Cluster, model: str, options: argparse.Namespace) -> int:
    """Both runs and the verdict; returns the number of requests that failed."""
    started = time.monotonic()
    specs = make_specs(options.requests, options.seed, options.longest)
    client = Client(cluster, model, started + options.seconds)
    try:
        undisturbed = await run_all(client, specs)
        calm = time.monotonic() - started
        if bad := [answer for answer in undisturbed if answer.problem or answer.error]:
            raise SystemExit(f"the undisturbed run failed: {bad[0].problem or bad[0].error}")
        trouble = Trouble(cluster, options.seed, options.disturbances, options.gap, options.away)
        troubling = asyncio.create_task(trouble.run())
        enough = partial(_is_over, troubling, started + options.seconds)
        disturbed = await run_all(client, repeated(specs, enough))
        troubling.cancel()
        with suppress(asyncio.CancelledError):
            await troubling
    finally:
        await client.close()
    verdicts = [judge(answer, undisturbed[answer.spec.index]) for answer in disturbed]
    _report(cluster, trouble, disturbed, verdicts, calm, time.monotonic() - started - calm)
    return sum(map(bool, verdicts))


def _is_over(task: asyncio.Task[None], until: float) -> bool:
    return task.done() or time.monotonic() > until


def _report(
    cluster: Cluster, trouble: Trouble, answers: list[Answer], verdicts: list[str], calm: float, rough: float
) -> None:
    for answer, verdict in zip(answers, verdicts, strict=True):
        if verdict:
            print(f"request {answer.spec.index} (temperature {answer.spec.temperature:g}): {verdict}")
    for error, number in Counter(answer.error for answer in answers if answer.error).items():
        print(f"ended with an error {number}x: {error}")
    print(f"undisturbed {calm:.0f} s, disturbed {rough:.0f} s")
    kinds = ", ".join(f"{name} {n}" for name, n in sorted(trouble.counts.items()))
    print(f"{trouble.counts.total()} disturbances: {kinds or 'none'}")
    print(
        f"streams cut off {sum(a.cut for a in answers)}, resumed by id {sum(a.resumed for a in answers)}, "
        f"begun anew {sum(len(a.pieces) for a in answers)}, refused and tried again {sum(a.refused for a in answers)}"
    )
    engines = "".join(engine.log() for engine in cluster.engines)
    print(f"leases lost {engines.count('the lease was lost')}, dead letters {_dead_letters(cluster)}")
    failed = sum(map(bool, verdicts))
    print(f"{len(verdicts) - failed} passed, {failed} failed")


def _dead_letters(cluster: Cluster) -> int:
    cluster.revive()
    cluster.await_ready()
    view = QueueView(cluster.store_url)
    try:
        return len(view.dead_letters())
    finally:
        view.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny (random weights), an alias, a folder or a GGUF file")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=300, help="output tokens of the longest request")
    parser.add_argument("--disturbances", type=int, default=12)
    parser.add_argument("--gap", type=float, default=1.5, help="mean seconds between two disturbances")
    parser.add_argument("--away", type=float, default=10.0, help="seconds that the store is away")
    parser.add_argument("--seconds", type=float, default=600.0, help="requests that have not ended by then have failed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="noria-tiny-") as folder:
        model = str(make(Path(folder) / "tiny")) if options.model == "tiny" else options.model
        sizes = ("--kv-memory=64MiB", "--max-model-len=1024", "--served-model-name=chaos")
        with Cluster(model, engine_options=sizes) as cluster:
            return 1 if asyncio.run(chaos(cluster, "chaos", options)) else 0


if __name__ == "__main__":
    sys.exit(main())
