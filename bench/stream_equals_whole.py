"""Whether a stream, put together, is the answer that comes whole: 300 random requests, each sent both ways at once.

    python -m bench.stream_equals_whole               # the demo model; --requests, --seed, --model

Text, calls, log-probabilities, the reason for the end and the usage have to be the same, and so has the refusal of a
request that is refused. Starts a store, an engine and a gateway of its own. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.cluster import KEY, Cluster
from bench.joined import Malformed, streamed, whole
from bench.random_requests import Ask, RandomRequests
from noria.engine.config import DEMO_MODEL

AT_ONCE = 8
ENGINE = ("--kv-memory=256MiB", "--max-model-len=1024", "--no-prefix-cache")
"""Without a prefix cache: which tokens of a prompt were there already is in the usage."""


@dataclass
class Comparison:
    """What came of all requests. `refused`: both ways, with the same words."""

    equal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


async def compare(url: str, asks: Sequence[Ask]) -> Comparison:
    """Send every request both ways."""
    found, turns = Comparison(), asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=300, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def one(ask: Ask) -> None:
            async with turns:
                try:
                    await _compare_one(client, ask, found)
                except (Malformed, httpx.HTTPError, KeyError, ValueError) as error:
                    found.differences.append(f"{ask}: {error!r}")

        await asyncio.gather(*map(one, asks))
    return found


async def _compare_one(client: httpx.AsyncClient, ask: Ask, found: Comparison) -> None:
    options = {} if ask.path.endswith("/responses") else {"stream_options": {"include_usage": True}}
    headers = {"x-noria-resumable": "true"} if ask.resumable else {}
    plain, stream = await asyncio.gather(
        client.post(ask.path, json=ask.body),
        client.post(ask.path, json={**ask.body, "stream": True, **options}, headers=headers),
    )
    if plain.status_code != 200 or stream.status_code != 200:
        if (plain.status_code, plain.text) != (stream.status_code, stream.text) or plain.status_code >= 500:
            found.differences.append(f"{ask}: {plain.status_code} {plain.text} / {stream.status_code} {stream.text}")
        else:
            found.refused[plain.json()["error"]["message"]] += 1
        return
    one, other = whole(ask.path, plain.json()), streamed(ask.path, stream.text.split("\n"))
    if place := difference(one, other):
        found.differences.append(f"{ask}: {place}")
        return
    found.equal += 1
    found.seen.update(_kinds(ask, one))


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """Where two values differ first, None if they do not."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        found = (difference(one[key], other[key], f"{place}.{key}") for key in one)
        return next((deeper for deeper in found if deeper), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((deeper for deeper in found if deeper), None)
    same = type(one) is type(other) and one == other
    return None if same else f"{place}: whole {json.dumps(one)[:300]}, streamed {json.dumps(other)[:300]}"


def _kinds(ask: Ask, said: dict[str, Any]) -> list[str]:
    """What was compared, to be counted."""
    kinds = [ask.path.removeprefix("/v1/"), *sorted(ask.body.keys() - {"model"})]
    ends = [str(choice["finish_reason"]) for choice in said.get("choices", ())] or [said["status"]]
    calls = sum(len(choice.get("calls", ())) for choice in said.get("choices", ()))
    calls += sum(item["type"] == "function_call" for item in said.get("output", ()))
    return [*kinds, *(f"ended: {end}" for end in ends), *(["calls"] * calls), *(["event ids"] * ask.resumable)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    with Cluster(options.model, num_engines=1, num_gateways=1, engine_options=ENGINE, lease_seconds=20) as cluster:
        url = cluster.gateways[0].url
        model, vocab_size = served(url)
        warm(url, model)
        requests = RandomRequests(model, vocab_size, seed=options.seed, max_tokens=options.max_tokens)
        started = time.monotonic()
        found = asyncio.run(compare(url, [requests.ask() for _ in range(options.requests)]))
    print("\n".join(found.differences))
    print("refused: " + "; ".join(f"{num} x {message}" for message, num in found.refused.most_common()))
    print("compared: " + ", ".join(f"{kind} {num}" for kind, num in sorted(found.seen.items())))
    print(
        f"{options.requests} requests both ways in {time.monotonic() - started:.0f} s: {found.equal} equal, "
        f"{found.refused.total()} refused both ways, {len(found.differences)} different"
    )
    return int(bool(found.differences))


def warm(url: str, model: str) -> None:
    """Have the engine start what compiles grammars, which takes seconds on a busy machine."""
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        body = {"model": model, "prompt": "a", "guided_choice": ["a"]}
        for _ in range(20):
            if client.post("/v1/completions", json=body).status_code == 200:
                return
    raise TimeoutError("no grammar is compiled")


def served(url: str) -> tuple[str, int]:
    """The first model's id, and how many ids its vocabulary has."""
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        error = client.post("/v1/detokenize", json={"model": model, "tokens": [2**31]}).json()["error"]["message"]
        return model, int(error.rpartition("0 to ")[2].rstrip(").")) + 1


if __name__ == "__main__":
    sys.exit(main())
