"""What a request gets does not depend on the engine's features: policies, chunks, cached prefixes, speculation,
company, preemption at any moment. A tiny model of random weights, so that many combinations take seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Protocol

import pytest

from bench.tiny_model import make
from noria.engine.config import EngineConfig
from noria.engine.execution.executor import Executor
from noria.engine.execution.step import StepInput
from noria.engine.live import LiveRequest
from noria.engine.offline import OfflineEngine
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.scheduling.speculation import Drafter
from noria.engine.wire.messages import Claimed, GenerationRequest, Grammar, ModelCard, SamplingParams

GREEDY = {"temperature": 0.0}
PARAMS: list[dict[str, Any]] = [
    GREEDY,
    GREEDY | {"logprobs": 2, "ignore_eos": True},
    {"seed": 5, "temperature": 0.6},
    {"seed": 6, "temperature": 0.9, "top_p": 0.9, "logprobs": 0},
    {"seed": 7, "temperature": 0.4, "frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"seed": 8, "temperature": 0.5, "min_tokens": 20, "stop_token_ids": tuple(range(40, 70))},
    GREEDY | {"logit_bias": {50: 4.0, 51: 3.5, 52: 3.0}},
    {"seed": 9, "temperature": 1.0, "top_k": 5, "min_p": 0.01, "ignore_eos": True},
    {"seed": 10, "temperature": 0.7, "grammar": Grammar("regex", "([a-c]{2},){6,30}")},
]


def requests() -> list[GenerationRequest]:
    """Long common beginnings, passages that repeat themselves, and predictions that are partly right."""
    common = [3 + i * 7 % 90 for i in range(37)]
    found = []
    for index, params in enumerate(PARAMS):
        prompt = common[: 37 - index % 3 * 9] + [10 + index, 20, 21, 22, 23] * (1 + index % 4)
        sampling = SamplingParams(max_tokens=30 + 3 * index, **params)
        found.append(GenerationRequest(str(index), "tiny", prompt, sampling, gateway=""))
    return found


Answer = tuple[list[int], str | None, list[float]]


class Parts(Protocol):
    """What `run` needs of an engine."""

    _scheduler: Scheduler
    _executor: Executor
    card: ModelCard


def run(
    engine: Parts, asked: list[GenerationRequest], before_step: Callable[[Scheduler], None] = lambda _: None
) -> list[Answer]:
    """Tokens, reason of the end and log-probabilities of each request, computed together."""
    scheduler, executor = engine._scheduler, engine._executor
    live = {r.id: LiveRequest.start(Claimed(r, 1, []), engine.card, r.id) for r in asked}
    logprobs: dict[str, list[float]] = {r.id: [] for r in asked}
    for one in live.values():
        grammar = one.claimed.request.sampling.grammar
        if grammar is not None:
            one.follow(engine._assembly.grammars.compile(grammar).result())
        scheduler.add(one.scheduled)
    while len(scheduler):
        before_step(scheduler)
        batch = scheduler.select()
        assert batch is not None
        rows = [live[row.request.id].row(row, engine.card) for row in batch.rows]
        outputs = executor.run(StepInput(rows, batch.num_decode_rows))
        scores = {row.request.id: output.logprobs for row, output in zip(batch.rows, outputs, strict=True)}
        for progress in scheduler.complete(batch, [output.token_ids for output in outputs]):
            name = progress.request.id
            live[name].note_output(progress)
            frame = live[name].frame(progress, scores.get(name))
            assert frame.logprobs is None or [entry.token_id for entry in frame.logprobs] == frame.token_ids
            logprobs[name] += [round(entry.logprob, 3) for entry in frame.logprobs or ()]
    scheduler.check()
    assert scheduler.kv.num_free == scheduler.kv.num_blocks
    done = [live[r.id].scheduled for r in asked]
    return [(r.tokens[r.num_prompt :], r.finish, logprobs[r.id]) for r in done]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OfflineEngine]]:
    model = str(make(tmp_path_factory.mktemp("tiny"), max_len=256))
    engines: list[OfflineEngine] = []

    def build(**options: Any) -> OfflineEngine:
        engines.append(OfflineEngine(EngineConfig(model=model, **{"kv_memory": "4MiB", "kv_dtype": "fp32", **options})))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone(engine_of: Callable[..., OfflineEngine]) -> list[Answer]:
    plain = engine_of(prefix_cache=False)
    return [run(plain, [request])[0] for request in requests()]


SPECULATING = {"speculate": "ngram", "draft_tokens": 5}
STARVED = {"kv_memory": "96KiB", "max_model_len": 128}  # 12 blocks: one long request fills the pool


def test_the_answers_are_worth_comparing(alone: list[Answer]) -> None:
    assert len({tuple(tokens) for tokens, _, _ in alone}) == len(alone)
    assert {finish for _, finish, _ in alone} == {"stop", "length"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "orca"},
        {"policy": "static"},
        {"max_batch_size": 3, "max_batch_tokens": 16},
        STARVED,
        STARVED | {"prefix_cache": False},
        SPECULATING,
        SPECULATING | {"policy": "orca"},
        SPECULATING | {"policy": "static"},
        SPECULATING | {"max_batch_size": 3, "max_batch_tokens": 16, "block_size": 5},
        SPECULATING | STARVED,
        SPECULATING | STARVED | {"prefix_cache": False, "max_batch_tokens": 20},
    ],
    ids=str,
)
def test_features_change_nothing(
    engine_of: Callable[..., OfflineEngine], alone: list[Answer], options: dict[str, Any]
) -> None:
    engine = engine_of(**options)
    assert run(engine, requests()) == alone
    assert run(engine, requests()[::-1]) == alone[::-1], "on what the first round left in the cache"
    counts = engine._scheduler.speculation
    assert (counts.drafted > counts.accepted > 0) == ("speculate" in options)
    assert (engine._scheduler.preemptions.memory > 5) == ("kv_memory" in options)


@pytest.mark.parametrize("options", [{}, SPECULATING], ids=str)
def test_preemption_at_any_moment_changes_nothing(
    engine_of: Callable[..., OfflineEngine], alone: list[Answer], options: dict[str, Any]
) -> None:
    engine, chance = engine_of(**options), Random(11)

    def preempt_some(scheduler: Scheduler) -> None:
        for request in list(scheduler.running):
            if chance.random() < 0.08:
                scheduler._admission.preempt(request)

    assert run(engine, requests(), preempt_some) == alone
    assert engine._scheduler.preemptions.recomputed > 0


def test_a_right_prediction_is_taken_whole_and_a_wrong_one_harms_nobody(
    engine_of: Callable[..., OfflineEngine], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []  # right and wrong guesses, for each frame
    take = Drafter.take_predicted
    monkeypatch.setattr(Drafter, "take_predicted", lambda drafter: told.append(take(drafter) or (0, 0)))
    engine = engine_of(**SPECULATING)
    asked = requests()[1]
    fields = {name: getattr(asked, name) for name in asked.__struct_fields__}
    tokens = alone[1][0]
    num_steps, tried = [], []
    for prediction in (tokens, [*tokens[:9], 5, *tokens[9:]], [5, 6, 7, 8] * 10):
        steps: list[int] = []
        told.clear()
        request = GenerationRequest(**fields | {"prediction": prediction})
        assert run(engine, [request], lambda _, steps=steps: steps.append(1)) == [alone[1]]
        num_steps.append(len(steps))
        tried.append((sum(right for right, _ in told), sum(wrong for _, wrong in told)))
    assert tried[0] == (len(tokens) - num_steps[0], 0)
    assert tried[1][0] > 9 and tried[1][1] > 0
    assert tried[2][0] == 0
    assert num_steps[0] == 1 + -(-(len(tokens) - 1) // 6), "all guesses were right"
    assert num_steps[0] < num_steps[1] <= num_steps[0] + 4
