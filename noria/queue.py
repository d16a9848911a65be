"""`noria queue`: what waits, who runs it, and what was given up; as tables for people or as JSON for programs.

Knows how to show and which words it takes; the reading is the broker's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noria.engine.wire.broker import BrokerUnavailable, QueueFull
from noria.engine.wire.queue_view import DeadLetter, NoSuchLetter, PoolView, QueueView, open_view
from noria.gateway.schemas.operations import died, shown_letter, shown_pool
from noria.store_address import CannotShow, store_url, unreachable
from noria.supervisor import EXIT_CONFIGURATION, EXIT_FAILED
from noria.tables import columns, console

TOP_TENANTS = 10
USAGE = "noria queue, or: noria queue dead list | show ID | requeue ID | drop ID"


def queue_command(words: Sequence[str], redis_url: str | None, state_dir: Path | None, *, as_json: bool) -> int:
    """Run `noria queue WORDS`; returns the exit code. Raises CannotShow."""
    url = store_url(redis_url, state_dir)
    try:
        with open_view(url) as view:
            return _run(list(words), view, as_json)
    except BrokerUnavailable as error:
        raise unreachable(error) from None
    except NoSuchLetter as error:
        raise CannotShow(f"no dead letter has the id {error.args[0]}", EXIT_FAILED) from None
    except QueueFull as error:
        raise CannotShow(str(error), EXIT_FAILED) from None
    except ValueError as error:
        raise CannotShow(str(error), EXIT_CONFIGURATION) from None


def _run(words: list[str], view: QueueView, as_json: bool) -> int:
    match words:
        case []:
            pools = view.pools()
            _print_json([shown_pool(pool) for pool in pools]) if as_json else _show_pools(pools)
        case ["dead"] | ["dead", "list"]:
            letters = view.dead_letters()
            _print_json([shown_letter(letter) for letter in letters]) if as_json else _show_letters(letters)
        case ["dead", "show", letter_id]:
            letter = view.find(letter_id)
            _print_json(shown_letter(letter, whole=True)) if as_json else _show_letter(letter)
        case ["dead", "requeue", letter_id]:
            letter = view.find(letter_id)
            asyncio.run(view.requeue(letter))
            _say({"requeued": letter.request_id}, f"{letter.request_id} waits again for {letter.model}", as_json)
        case ["dead", "drop", letter_id]:
            letter = view.find(letter_id)
            view.drop(letter)
            _say({"dropped": letter.request_id}, f"{letter.request_id} is dropped", as_json)
        case _:
            raise CannotShow(f"unknown: {' '.join(words)}; usage: {USAGE}", EXIT_CONFIGURATION)
    return 0


# --- for people -------------------------------------------------------------------------------------------------------


def _show_pools(pools: list[PoolView]) -> None:
    screen = console()
    if not pools:
        screen.print("No model is known to this store: no engine has been here for ten minutes.")
    for place, pool in enumerate(pools):
        if place:
            screen.print()
        depth = "  ".join(f"{name} {number}" for name, number in pool.depth.items())
        screen.print(pool.model, style="bold", markup=False)
        screen.print(f"  waiting   {sum(pool.depth.values())}  ({depth})")
        screen.print(f"  suspects  {pool.suspects}")
        screen.print(f"  tokens    {pool.tokens_queued}")
        screen.print(f"  bytes     {pool.bytes_queued}")
        screen.print(f"  dead      {pool.dead_letters}")
        if pool.tenants:
            tenants = columns("  TENANT", "WAITING", "TOKENS", numbers=("WAITING", "TOKENS"))
            for tenant in pool.tenants[:TOP_TENANTS]:
                tenants.add_row(f"  {tenant.tenant}", str(tenant.requests), str(tenant.tokens))
            screen.print(tenants)
        numbers = ("LEASE", "HELD", "RUNNING", "BATCH", "KV")
        engines = columns("  ENGINE", *numbers, "STATE", numbers=numbers)
        for engine in pool.engines:
            stats = engine.stats
            used = f"{100 * stats.kv_blocks_used / stats.kv_blocks_total:.0f} %" if stats.kv_blocks_total else "-"
            engines.add_row(
                f"  {engine.engine}",
                f"{engine.lease_seconds:.1f} s",
                str(engine.held),
                str(stats.running),
                str(stats.batch_size),
                used,
                "lapsed" if engine.lease_seconds < 0 else "draining" if stats.draining else "live",
            )
        screen.print(engines if pool.engines else "  no engine")


def _show_letters(letters: list[DeadLetter]) -> None:
    if not letters:
        console().print("No dead letters.")
        return
    table = columns("ID", "MODEL", "TENANT", "DIED", "ATTEMPTS", "ERROR", numbers=("ATTEMPTS",))
    for letter in letters:
        tenant = letter.request.tenant if letter.request else "?"
        table.add_row(letter.request_id, letter.model, tenant, died(letter), str(letter.attempts), letter.error)
    console().print(table)


def _show_letter(letter: DeadLetter) -> None:
    table = columns("", "")
    table.show_header = False
    for name, value in shown_letter(letter, whole=True).items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    console().print(table)


# --- for programs -----------------------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def _say(record: dict[str, str], line: str, as_json: bool) -> None:
    if as_json:
        _print_json(record)
    else:
        print(line)
