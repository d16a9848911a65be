"""`noria bench`: load on any server with OpenAI's API, as a table, a plot and JSON.

Knows options and how to show figures; `load.py` makes them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from noria.load import Client, Done, LoadError, Outcome, Target, calibrate, first_model, open_session, summary, takes
from noria.options import BadSetting, check_lengths
from noria.replay import Workload
from noria.store_address import kept_api_key
from noria.supervisor import EXIT_FAILED, EXIT_KILLED
from noria.tables import columns, console

LEVELS = (1, 4, 16)
"""Requests at once, where neither --concurrency nor --rate is given."""
IGNORE_EOS = {"ignore_eos": True}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bench_command(
    *,
    base_url: Annotated[str, typer.Option(help="The server, with its /v1.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="(default: the first that the server lists)")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat completions; else completions, whose prompts have no template.")
    ] = False,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeat it. (default: 1, 4, 16)")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second, arriving at random (Poisson); repeat it.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests of each load; 0: four for each at once, 100 for a rate.")
    ] = 0,
    prompt: Annotated[tuple[int, int], typer.Option(help="Prompt tokens, uniform.")] = (32, 512),
    output: Annotated[tuple[int, int], typer.Option(help="Output tokens, uniform.")] = (1, 128),
    stop_at_end: Annotated[
        bool, typer.Option("--stop-at-end", help="Let the model end its answers (no ignore_eos).")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a byte after which a request failed.")] = 300,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals; words are new each time.")] = 0,
    state_dir: Annotated[
        Path | None, typer.Option(help="State folder of the noria serve whose key is used where none is set.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against throughput into this PNG.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> int:
    """Measure a server under load: throughput, first token, between tokens. The default lengths are Orca's.

    The key is that of NORIA_API_KEY, else OPENAI_API_KEY, else the one that noria serve keeps on this machine.
    """
    _check(prompt, output, rate)
    if plot is not None and find_spec("matplotlib") is None:
        raise BadSetting("--plot needs matplotlib: pip install matplotlib")
    target = Target(
        base_url.rstrip("/"), model or "", chat, _headers(base_url, state_dir), {} if stop_at_end else IGNORE_EOS
    )
    workload = Workload(requests, prompt, output, seed=seed)
    found: list[dict[str, Any]] = []
    code = 0
    try:
        asyncio.run(_measure(target, workload, _loads(concurrency, rate), timeout, found))
    except LoadError as error:
        print(f"noria: {error}", file=sys.stderr)
        code = EXIT_FAILED
    except KeyboardInterrupt:  # what was measured is shown
        code = EXIT_KILLED
    if found:
        console().print(table_of(found))
        console().print("medians, each with its p99; ITL: between two tokens; ms/tok: a request's time over its tokens")
        for message in sorted({message for result in found for message in result["errors"]}):
            print(f"noria: failed: {message}", file=sys.stderr)
        if json_file is not None:
            settings = {"base_url": target.base_url, "model": found[0]["model"], "chat": chat, "seed": seed}
            json_file.write_text(
                json.dumps({**settings, "prompt": prompt, "output": output, "results": found}, indent=2) + "\n"
            )
        if plot is not None:
            draw(found, plot)
    return code or (EXIT_FAILED if any(result["failed"] for result in found) else 0)


def _headers(base_url: str, state_dir: Path | None) -> dict[str, str]:
    key = os.environ.get("NORIA_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
    if not key and urlsplit(base_url).hostname in LOOPBACK:
        key = kept_api_key(state_dir)  # never sent to another machine
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key.split(',')[0]}"} if key else {})}


def _check(prompt: tuple[int, int], output: tuple[int, int], rates: Sequence[float] | None) -> None:
    check_lengths(prompt=prompt, output=output)
    for rate in rates or ():
        if not 0 < rate < float("inf"):  # nan included
            raise BadSetting(f"--rate {rate:g}: must be more than 0")


def _loads(levels: Sequence[int] | None, rates: Sequence[float] | None) -> list[tuple[str, float]]:
    if not levels and not rates:
        levels = LEVELS
    return [*(("concurrency", float(level)) for level in levels or ()), *(("rate", rate) for rate in rates or ())]


async def _measure(
    target: Target, workload: Workload, loads: Sequence[tuple[str, float]], timeout: float, found: list[dict[str, Any]]
) -> None:
    """A result for each load, added to `found` as it is ready. Raises LoadError."""
    async with open_session(timeout) as session:
        target = replace(target, model=target.model or await first_model(session, target.base_url, target.headers))
        plain = replace(target, extra={})
        salt = secrets.token_hex(8)  # so that no cache knows the words of an earlier run
        prompts = await calibrate(session, plain, salt)
        if target.extra and not await takes(session, target):
            print("noria: the server refuses ignore_eos: answers may end before their length", file=sys.stderr)
            target = plain
        for kind, value in loads:
            count = workload.num_requests or (4 * int(value) if kind == "concurrency" else 100)
            client = Client(session, target, replace(prompts, seed=f"{salt}/{kind}/{value}"))
            arrivals = replace(workload, num_requests=count).arrivals(value)
            with _progress(f"{value:g} {'at once' if kind == 'concurrency' else 'requests/s'}", count) as done:
                if kind == "concurrency":
                    outcomes = await client.closed_loop(arrivals, int(value), done)
                else:
                    outcomes = await client.open_loop(arrivals, done)
            found.append({"load": kind, "value": value, "model": target.model, **summary(outcomes)})


@contextmanager
def _progress(text: str, total: int) -> Iterator[Done]:
    """A bar on standard error, where that is a terminal."""
    screen = Console(stderr=True)
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*parts, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(text, total=total)

        def done(outcome: Outcome) -> None:
            progress.advance(task)

        yield done


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """The figures for a terminal, a row for each load."""
    headings = ("load", "done", "failed", "tok/s", "req/s", "TTFT s", "p99", "ITL ms", "p99", "ms/tok", "p99")
    table = columns(*headings, numbers=headings)
    for result in results:
        load = f"{result['value']:g} {'at once' if result['load'] == 'concurrency' else 'req/s'}"
        cells = [load, str(result["requests"] - result["failed"]), str(result["failed"])]
        if "seconds" in result:
            cells += [f"{result['tokens_per_second']:.1f}", f"{result['requests_per_second']:.2f}"]
            cells += [f"{result[f'time_to_first_token_{part}']:.2f}" for part in ("median", "p99")]
            cells += [f"{1e3 * result[f'inter_token_{part}']:.0f}" for part in ("median", "p99")]
            cells += [f"{1e3 * result[f'latency_per_token_{part}']:.0f}" for part in ("median", "p99")]
        table.add_row(*cells)
    return table


def draw(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Latency per token and first token against throughput."""
    from matplotlib.figure import Figure  # of the extra `bench`

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    measures = {"latency_per_token": "latency per token [s]", "time_to_first_token": "time to first token [s]"}
    for axes, (measure, label) in zip(figure.subplots(1, 2), measures.items(), strict=True):
        for kind in ("concurrency", "rate"):
            points = [result for result in results if result["load"] == kind and "seconds" in result]
            for part, style in (("median", "o-"), ("p99", "o--")) if points else ():
                axes.plot(
                    [point["tokens_per_second"] for point in points],
                    [point[f"{measure}_{part}"] for point in points],
                    style,
                    label=f"by {kind}, {part}",
                )
        axes.set(xlabel="output tokens/s", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150, format="png")
