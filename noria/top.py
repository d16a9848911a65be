"""`noria top`: models, queues, engines and tenants, live. Rates are differences between two looks at the store.

Knows how to show; the reading is the broker's. Looking disturbs nobody.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from noria.engine.wire.broker import BrokerUnavailable
from noria.engine.wire.messages import EngineStats
from noria.engine.wire.queue_view import EngineView, PoolView, QueueView, open_view
from noria.store_address import unreachable
from noria.tables import columns

TOP_TENANTS = 10
BAR = 12  # characters of a bar

Counters = Mapping[tuple[str, str], EngineStats]  # by model and engine, at the last look


def top(url: str, interval: float, *, once: bool) -> int:
    """Show until Ctrl-C, or one look. A store that is away is said on the screen, and asked again; for one look,
    CannotShow is raised."""
    with open_view(url) as view:
        screens = _screens(view, interval)
        if once or not sys.stdout.isatty():
            try:
                view.pools()
            except BrokerUnavailable as error:
                raise unreachable(error) from None
            next(screens)  # the first has no rates yet
            Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(next(screens))
            return 0
        with Live(next(screens), screen=True, auto_refresh=False) as live:
            try:
                for screen in screens:
                    live.update(screen, refresh=True)
            except KeyboardInterrupt:
                return 0
    return 0


def _screens(view: QueueView, interval: float) -> Iterator[RenderableType]:
    """One look every `interval` seconds, for ever."""
    before: Counters = {}
    looked = 0.0
    while True:
        now = time.monotonic()
        try:
            pools = view.pools()
        except BrokerUnavailable as error:
            before, shown = {}, Text(f"the store cannot be reached at {error}", style="red")
            yield shown
        else:
            yield picture(pools, before, now - looked)
            before = {(p.model, e.engine): e.stats for p in pools for e in p.engines}
        looked = now
        time.sleep(max(0.0, interval - (time.monotonic() - now)))


def picture(pools: list[PoolView], before: Counters, seconds: float) -> RenderableType:
    """All pools; rates over the `seconds` since `before`."""
    if not pools:
        return Text("No model is known to this store: no engine has been here for ten minutes.")
    return Group(*(part for pool in pools for part in _pool(pool, before, seconds)))


def _pool(pool: PoolView, before: Counters, seconds: float) -> Iterator[RenderableType]:
    waiting = "  ".join(f"{name} {number}" for name, number in pool.depth.items())
    heading = Text(pool.model, style="bold")
    heading.append(f"   waiting {sum(pool.depth.values())} ({waiting})   tokens {pool.tokens_queued}", style="not bold")
    if pool.dead_letters:
        heading.append(f"   dead {pool.dead_letters}", style="red")
    yield heading
    yield _engines(pool, before, seconds)
    if pool.tenants:
        yield _tenants(pool)
    yield Text()


def _engines(pool: PoolView, before: Counters, seconds: float) -> Table:
    rates = ("TOKENS/S", "PROMPT/S", "ITERATIONS/S", "MS", "CACHED")
    numbers = ("RUNNING", "WAITING", "ROWS", "KV")
    table = columns("  ENGINE", *numbers, "", *rates, "STATE", numbers=numbers + rates)
    for engine in pool.engines:
        now, then = engine.stats, before.get((pool.model, engine.engine))
        used = now.kv_blocks_used / max(now.kv_blocks_total, 1)
        table.add_row(
            f"  {engine.engine}",
            str(now.running),
            str(now.waiting),
            str(now.batch_size),
            f"{used:.0%}",
            _bar(used),
            *_rates(now, then, seconds),
            _state(engine),
        )
    if not pool.engines:
        table.add_row("  no engine")
    return table


def _rates(now: EngineStats, then: EngineStats | None, seconds: float) -> tuple[str, ...]:
    """Tokens, prompt tokens and iterations a second, milliseconds an iteration, share of prompts found in the cache."""
    if then is None or now.iterations_total < then.iterations_total:  # new, or started anew
        return ("-",) * 5
    iterations = now.iterations_total - then.iterations_total
    prompt = now.prompt_tokens_total - then.prompt_tokens_total
    cached = now.cached_tokens_total - then.cached_tokens_total
    spent = now.iteration_seconds_sum - then.iteration_seconds_sum
    return (
        f"{(now.generation_tokens_total - then.generation_tokens_total) / seconds:.1f}",
        f"{prompt / seconds:.1f}",
        f"{iterations / seconds:.1f}",
        f"{1000 * spent / iterations:.1f}" if iterations else "-",
        f"{cached / (prompt + cached):.0%}" if prompt + cached else "-",
    )


def _tenants(pool: PoolView) -> Table:
    table = columns("  TENANT", "WAITING", "TOKENS", numbers=("WAITING", "TOKENS"))
    for tenant in pool.tenants[:TOP_TENANTS]:
        table.add_row(Text(f"  {tenant.tenant}"), str(tenant.requests), str(tenant.tokens))
    return table


def _state(engine: EngineView) -> Text:
    if engine.lease_seconds < 0:
        return Text("lapsed", style="red")
    return Text("draining", style="yellow") if engine.stats.draining else Text("live", style="green")


def _bar(share: float) -> Text:
    full = round(BAR * min(share, 1.0))
    bar = Text("█" * full, style="red" if share > 0.9 else "cyan")
    return bar.append("░" * (BAR - full), style="dim")
