"""Tokens per second of a running server at several concurrencies, and their ratios, in one run.

    NORIA_API_KEY=sk-… python bench/concurrency.py --base-url http://127.0.0.1:8000/v1 --levels 1 8 16

Every level is measured in every round, so that a machine that others share slows all levels alike; the medians over
the rounds are compared. Output is forced to its full length.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

import httpx


async def generate(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/completions", json=body)
    answer.raise_for_status()
    count: int = answer.json()["usage"]["completion_tokens"]
    return count


async def level(client: httpx.AsyncClient, model: str, concurrency: int, max_tokens: int, tag: int) -> float:
    """Tokens per second of `concurrency` requests sent at once, from the first sent to the last answered."""
    started = time.perf_counter()
    prompts = [f"Round {tag}, letter {i} to a friend who lives far away by the sea:" for i in range(concurrency)]
    tokens = await asyncio.gather(*(generate(client, model, prompt, max_tokens) for prompt in prompts))
    return sum(tokens) / (time.perf_counter() - started)


async def measure(options: argparse.Namespace) -> dict[int, list[float]]:
    headers = {"Authorization": f"Bearer {os.environ.get('NORIA_API_KEY', '')}"}
    rates: dict[int, list[float]] = {concurrency: [] for concurrency in options.levels}
    async with httpx.AsyncClient(base_url=options.base_url, headers=headers, timeout=600) as client:
        model = options.model or (await client.get("/models")).json()["data"][0]["id"]
        await level(client, model, max(options.levels), 4, 0)  # warm
        for number in range(1, options.rounds + 1):
            for concurrency in options.levels:
                rates[concurrency].append(await level(client, model, concurrency, options.tokens, number))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rates = asyncio.run(measure(options))
    base = statistics.median(rates[options.levels[0]])
    print(f"{'concurrency':>11}  {'tokens/s, median':>16}  {'lowest':>7}  {'highest':>7}  {'ratio':>6}")
    for concurrency, values in rates.items():
        median = statistics.median(values)
        print(f"{concurrency:>11}  {median:>16.1f}  {min(values):>7.1f}  {max(values):>7.1f}  {median / base:>5.2f}x")


if __name__ == "__main__":
    main()
