"""`noria top`: what is shown, and rates between two looks."""

from __future__ import annotations

import subprocess
import sys

from rich.console import Console

from bench.store import running_store
from noria.engine.wire.broker import EngineBroker
from noria.engine.wire.messages import EngineStats, ModelCard, TokenizerFiles
from noria.engine.wire.queue_view import EngineView, PoolView, TenantView
from noria.top import picture

CARD = ModelCard("demo", (), 1, 512, 100, 1024, 16, (2,), False, "paged", "fp")
THEN = EngineStats(iterations_total=10, generation_tokens_total=100, prompt_tokens_total=50, iteration_seconds_sum=1.0)
NOW = EngineStats(
    running=3, batch_size=3, kv_blocks_total=64, kv_blocks_used=32, iterations_total=30, generation_tokens_total=160,
    prompt_tokens_total=80, cached_tokens_total=10, iteration_seconds_sum=1.5,
)  # fmt: skip


def pool(*engines: EngineView) -> PoolView:
    depth = {"priority": 0, "default": 2, "flex": 0, "batch": 0}
    return PoolView("demo", depth, 0, 99, 1000, [TenantView("bob [x]", 2, 99)], list(engines), dead_letters=1)


def shown(pools: list[PoolView], before: dict[tuple[str, str], EngineStats]) -> list[str]:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(pools, before, 2.0))
    return console.export_text().splitlines()


def test_rates_are_differences_over_the_time_between() -> None:
    lines = shown([pool(EngineView("e1", 4.0, 3, NOW))], {("demo", "e1"): THEN})
    assert lines[0].startswith("demo   waiting 2 (priority 0  default 2") and lines[0].rstrip().endswith("dead 1")
    (row,) = [line.split() for line in lines if line.strip().startswith("e1")]
    assert row[1:5] == ["3", "0", "3", "50%"]
    assert row[6:] == ["30.0", "15.0", "10.0", "25.0", "25%", "live"]
    assert any(line.split() == ["bob", "[x]", "2", "99"] for line in lines)


def test_an_engine_seen_first_or_started_anew_has_no_rates() -> None:
    for before in ({}, {("demo", "e1"): EngineStats(iterations_total=99)}):
        (row,) = [line for line in shown([pool(EngineView("e1", -1.0, 3, NOW))], before) if "e1" in line]
        assert row.split()[6:] == ["-"] * 5 + ["lapsed"]
    assert any("no engine" in line for line in shown([pool()], {}))
    assert "No model" in shown([], {})[0]


def test_one_look_at_a_real_store() -> None:
    with running_store() as store:
        engine = EngineBroker(store.url, CARD.id, engine_id="engine-one", lease_seconds=600)
        engine.register(CARD, TokenizerFiles("{}", None, None, None, False))
        engine.exchange({}, NOW, max_requests=0, max_blocks=0)
        command = [sys.executable, "-m", "noria", "top", "--once", "--interval", "0.1", "--redis-url", store.url]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert "engine-one" in done.stdout and "50%" in done.stdout
        engine.close()
    lost = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert lost.returncode == 1 and "cannot be reached" in lost.stderr
