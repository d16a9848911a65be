"""Models whose layers see the last tokens only: the blocks behind their windows go back, and nobody notices but the
memory. Tiny models of random weights; what nobody holds is poisoned before every iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, nan
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from noria.engine.config import EngineConfig
from noria.engine.execution.executor import Executor, LocalExecutor
from noria.engine.models.layer_groups import LayerGroups, group_layers
from noria.engine.models.load import inspect
from noria.engine.models.source import resolve
from noria.engine.offline import OfflineEngine
from noria.engine.plan import Plan, kv_groups, plan
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.request import HOLE
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.wire.messages import GenerationRequest, ModelCard, SamplingParams
from noria.kernels.pools import KVPools
from tests.engine.models.families import tiny_model
from tests.engine.test_features import Answer, run
from tests.engine.thread_ranks import thread_ranks

SIZE = 16
MODELS = ["mistral-window", "gemma3"]
"""One where all layers have windows, one where some have."""


def asked() -> list[GenerationRequest]:
    """Texts of several windows, with beginnings in common; the last two are copies."""
    common = [3 + i * 7 % 290 for i in range(70)]
    prompts = [common + [9] * 3, common[:50] + [5] * 60, common[:8], common + [9, 8, 7, 6] * 12, [11] * 33, [11] * 33]
    params = [SamplingParams(max_tokens=40 + 5 * i, temperature=0.5 * (i % 2), seed=i % 4) for i in range(len(prompts))]
    return [
        GenerationRequest(str(i), "tiny", prompt, sampling, gateway="")
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
    ]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder)
    Tokenizer(BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


def config(folder: Path, **options: Any) -> EngineConfig:
    settings = {"kv_memory": "4MiB", "kv_dtype": "fp32", "threads": 1, "max_batch_tokens": 64, **options}
    return EngineConfig(model=str(folder), **settings)


@pytest.fixture(scope="module")
def engine_of(model: Path) -> Iterator[Callable[..., OfflineEngine]]:
    engines: list[OfflineEngine] = []

    def build(**options: Any) -> OfflineEngine:
        engines.append(OfflineEngine(config(model, **options)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def kept(engine_of: Callable[..., OfflineEngine]) -> list[Answer]:
    """What each request gets alone where the KV cache holds the whole text of every layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("noria.engine.plan.group_layers", lambda spec: LayerGroups((0,), (0,) * spec.num_layers))
        engine = engine_of(prefix_cache=False)
    assert not engine._scheduler.kv.is_windowed
    return [run(engine, [request])[0] for request in asked()]


def poison(engine: OfflineEngine) -> Callable[[Scheduler], None]:
    """Makes numbers that are none of what no request and no prefix holds."""
    assert isinstance(engine._executor, LocalExecutor)
    pools: KVPools = engine._executor._execute.__self__._kv  # type: ignore[attr-defined]

    def before_step(scheduler: Scheduler) -> None:
        for pool in {id(pool): pool for pool in (*pools.keys, *pools.values)}.values():
            pool[scheduler.kv._free] = nan

    return before_step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False, "max_batch_tokens": 16},
        {"policy": "orca"},
        {"policy": "static", "max_batch_size": 4},
        {"speculate": "ngram", "max_batch_tokens": 21},
        {"kv_memory": "starved", "max_batch_tokens": 16},
        {"kv_memory": "starved", "max_batch_tokens": 24, "prefix_cache": False},
    ],
    ids=str,
)
def test_blocks_that_go_back_change_nothing(
    engine_of: Callable[..., OfflineEngine], kept: list[Answer], model: Path, options: dict[str, Any]
) -> None:
    options = dict(options)
    if is_starved := options.pop("kv_memory", None) is not None:
        options["kv_memory"] = starved(plan(config(model, **options)))
    engine = engine_of(**options)
    scheduler = engine._scheduler
    assert scheduler.kv.is_windowed
    holes = 0

    def before_step(scheduler: Scheduler) -> None:
        nonlocal holes
        holes = max(holes, sum(request.num_holes for request in scheduler.running))
        poison_free(scheduler)

    poison_free = poison(engine)
    assert run(engine, asked(), before_step) == kept
    assert holes > 0
    before = scheduler.kv.num_cached
    assert run(engine, asked(), before_step) == kept, "with prefixes from the cache"
    assert (before > 0) == scheduler.kv.prefix_cache
    if is_starved and len(scheduler.kv.groups.windows) > 1:  # else texts grow no more once they fill their windows
        assert scheduler.preemptions.memory


def starved(planned: Plan) -> str:
    """Memory for one of the longest texts and a page more."""
    longest = max(len(request.prompt) + request.sampling.max_tokens for request in asked())
    groups = kv_groups(planned.config, planned.groups)
    return str((groups.most(longest) + groups.num) * planned.kv_bytes // planned.num_blocks)


def test_a_long_text_holds_what_its_windows_show(engine_of: Callable[..., OfflineEngine], model: Path) -> None:
    """And a batch that fits for that reason alone runs at once."""
    groups = group_layers(inspect(resolve(str(model))))
    planned = plan(config(model, max_batch_tokens=32))
    limit = ceil((max(groups.windows) + 32) / SIZE) + 1  # blocks of a group with a window
    pages = ceil((250 + 50) / SIZE)
    most = sum(limit if window else pages for window in groups.windows)
    assert most <= len(groups.windows) * pages * 3 // 4
    engine = engine_of(max_batch_tokens=32, kv_memory=str((3 * most + 1) * (planned.kv_bytes // planned.num_blocks)))
    scheduler = engine._scheduler
    for length in (1, 40, 300, 500):  # the queue counts as the scheduler does
        assert engine.card.kv_blocks(length, 40) == scheduler.kv.groups.most(length)
    running = 0

    def before_step(scheduler: Scheduler) -> None:
        nonlocal running
        running = max(running, len(scheduler.running))
        for request in scheduler.running:
            for group, window in enumerate(groups.windows):
                held = request.blocks[group :: len(groups.windows)]
                assert len(held) - held.count(HOLE) <= (limit if window else pages)

    texts = [[3 + (i * j) % 290 for i in range(250)] for j in (7, 11, 13)]
    sampling = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    run(engine, [GenerationRequest(str(i), "tiny", t, sampling, gateway="") for i, t in enumerate(texts)], before_step)
    assert running == 3 and not scheduler.preemptions.total


@dataclass
class Ranks:
    """See `Parts`."""

    _scheduler: Scheduler
    _executor: Executor
    card: ModelCard


def test_stages_count_blocks_alike(model: Path, kept: list[Answer], engine_of: Callable[..., OfflineEngine]) -> None:
    """Each has some layers of each group, and computes from the one table of blocks."""
    with thread_ranks(config(model, pp=2)) as ranks:
        groups = kv_groups(ranks.plan.config, ranks.plan.groups)
        blocks = KVBlocks(4 * groups.most(100), SIZE, True, groups.windows, groups.max_step)
        scheduler = Scheduler(
            POLICIES["paged"],
            blocks,
            max_batch_size=4,
            max_batch_tokens=groups.max_step,
            max_model_len=512,
            num_stages=ranks.executor.depth,
        )
        assert run(Ranks(scheduler, ranks.executor, engine_of().card), asked()) == kept
