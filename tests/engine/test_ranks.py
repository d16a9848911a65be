"""A model on several ranks answers as on one, keeps its pipeline full, and says which rank was lost."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.tiny_model import make
from noria.engine.config import EngineConfig
from noria.engine.execution import ranks as ranks_module
from noria.engine.execution.executor import Executor, LocalExecutor, RankLost
from noria.engine.execution.model_runner import ModelRunner
from noria.engine.execution.ranks import StepFailed
from noria.engine.execution.step import NoMask, RowInput, RowOutput, Sampling, StepInput
from noria.engine.live import LiveRequest
from noria.engine.loading import load_model, new_runner
from noria.engine.plan import plan
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.trace import IterationLog, Times, TraceStart
from noria.engine.wire.messages import Claimed, GenerationRequest, ModelCard, SamplingParams
from noria.trace_file import read
from tests.engine.small_engine import CARD
from tests.engine.thread_ranks import ThreadRanks, thread_ranks

NUM_REQUESTS = 50
GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", num_layers=2)


def config_of(model: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model=str(model), kv_memory="8MiB", kv_dtype="fp32", max_model_len=256, threads=1, **fields)


def requests() -> list[GenerationRequest]:
    """Long and short, greedy and sampled, some with all that rows can carry, and two vectors."""
    chance = Random(7)
    made = []
    for number in range(NUM_REQUESTS):
        prompt = [chance.randrange(1, 97) for _ in range(chance.randrange(2, 50))]
        fields: dict[str, Any] = {"seed": number, "temperature": 1.0 if number % 2 else 0.0, "ignore_eos": True}
        if number % 5 == 1:
            fields |= {"logprobs": 2, "prompt_logprobs": 1, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}}
        params = SamplingParams(max_tokens=chance.randrange(3, 16), **fields)
        if number in (11, 30):
            made.append(GenerationRequest(str(number), "tiny", prompt, SamplingParams(0), "", pooling="mean"))
        else:
            made.append(GenerationRequest(str(number), "tiny", prompt, params, ""))
    return made


class Run:
    """Fifty requests that come two at a time, while those before them are computed. What each step was is kept."""

    def __init__(
        self,
        executor: Executor,
        policy: str,
        num_blocks: int = 200,
        max_draft: int = 0,
        trace: IterationLog | None = None,
    ) -> None:
        self._executor = executor
        self._scheduler = Scheduler(
            POLICIES[policy],
            KVBlocks(num_blocks, 16, policy == "paged"),
            max_batch_size=6,
            max_batch_tokens=64,
            max_model_len=256,
            num_stages=executor.depth,
            max_draft=max_draft,
        )
        card = ModelCard(**{f: getattr(CARD, f) for f in CARD.__struct_fields__} | {"eos_token_ids": (0,)})
        self.live = {r.id: LiveRequest.start(Claimed(r, 1, []), card, r.id) for r in requests()}
        self.logprobs: dict[str, list[Any]] = {i: [] for i in self.live}
        self.in_flight: list[int] = []  # before each result is waited for, while more wait than fit
        self.iterations: Counter[str] = Counter()
        self.num_steps = 0
        coming = deque(self.live.values())
        out = deque[Any]()
        while coming or len(self._scheduler):
            for _ in range(min(2, len(coming))):
                self._scheduler.add(coming.popleft().scheduled)
            while executor.in_flight < executor.depth and (batch := self._scheduler.select()):
                for row in batch.rows:
                    self.iterations[row.request.id] += 1
                self._is_first_come_first_served(policy)
                rows = [self.live[row.request.id].row(row, card) for row in batch.rows]
                executor.submit(StepInput(rows, batch.num_decode_rows))
                out.append((batch, time.perf_counter()))
                self.num_steps += 1
            if self._scheduler.waiting:
                self.in_flight.append(executor.in_flight)
            batch, submitted = out.popleft()
            outputs = executor.collect()
            self._fold(batch, outputs)
            if trace is not None:
                trace.record(batch, outputs, self._scheduler, Times(0.0, time.perf_counter() - submitted))
        self._scheduler.check()

    def _fold(self, batch: Any, outputs: list[RowOutput]) -> None:
        for row, output in zip(batch.rows, outputs, strict=True):
            assert output.error is None
            self.live[row.request.id].note_prompt(row, output)
            self.logprobs[row.request.id] += output.logprobs or []
        for progress in self._scheduler.complete(batch, [output.token_ids for output in outputs]):
            self.live[progress.request.id].note_output(progress)

    def _is_first_come_first_served(self, policy: str) -> None:
        """Orca, section 4.2: who came earlier has run as many iterations, or more."""
        if policy == "orca":
            counts = [self.iterations[r.id] for r in self._scheduler.running]
            assert counts == sorted(counts, reverse=True)

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {i: live.scheduled.tokens for i, live in self.live.items()}

    def scores(self) -> NDArray[np.float64]:
        own = [entry.logprob for entries in self.logprobs.values() for entry in entries]
        return np.array(own + [p.logprob for live in self.live.values() for p in live.prompt_logprobs if p is not None])

    def vectors(self) -> NDArray[np.float32]:
        return np.stack([np.frombuffer(self.live[i].pooled, np.float32) for i in ("11", "30")])


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Run]:
    planned = plan(config_of(model))
    executor = LocalExecutor(new_runner(planned, load_model(planned).model).execute)
    yield Run(executor, "paged")
    executor.close()


@pytest.fixture(scope="module", params=[(1, 2), (2, 1), (2, 2)], ids=lambda p: f"tp{p[0]}pp{p[1]}")
def ranks(request: pytest.FixtureRequest, model: Path) -> Iterator[ThreadRanks]:
    tp, pp = request.param
    with thread_ranks(config_of(model, tp=tp, pp=pp)) as running:
        yield running


@pytest.mark.parametrize("policy", ["orca", "paged", "static"])
def test_several_ranks_answer_as_one_does(ranks: ThreadRanks, alone: Run, policy: str) -> None:
    run = Run(ranks.executor, policy)
    assert run.tokens == alone.tokens
    assert np.allclose(run.scores(), alone.scores(), atol=1e-4) and len(run.scores()) > 200
    assert np.allclose(run.vectors(), alone.vectors(), atol=1e-4)
    if policy != "static":  # whose one closed batch steps as a whole
        assert len(run.in_flight) > 10 and set(run.in_flight) == {ranks.executor.depth}


@pytest.mark.parametrize("ranks", [(2, 2)], indirect=True, ids=["tp2pp2"])
def test_preemption_and_guesses_change_nothing(ranks: ThreadRanks, alone: Run) -> None:
    """And a step is one message to each rank, and one back from the last."""
    before = {r: (near.sent["step"], ranks.lines[r].sent["answer"]) for r, near in ranks.executor.lines.items()}
    run = Run(ranks.executor, "paged", num_blocks=24, max_draft=3)
    assert run.tokens == alone.tokens
    for rank, (steps, answers) in before.items():
        assert ranks.executor.lines[rank].sent["step"] - steps == run.num_steps
        assert ranks.lines[rank].sent["answer"] - answers == (run.num_steps if rank == 2 else 0)
        assert ranks.executor.lines[rank].sent["masks"] == 0


def test_the_trace_shows_two_batches_in_flight_at_all_times(ranks: ThreadRanks, tmp_path: Path) -> None:
    """Under load each iteration is on its way before the one before it is folded back, and never a third one."""
    if ranks.executor.depth != 2:
        pytest.skip("one stage")
    start = TraceStart("tiny", "orca", 6, 64, 64, 200, 16, 0.0)
    log = IterationLog(tmp_path / "trace", start)
    Run(ranks.executor, "orca", trace=log)
    log.close()
    iterations = read(tmp_path / "trace").iterations
    began = [i.at - i.forward_us / 1e6 for i in iterations]
    loaded = [n for n, i in enumerate(iterations[:-1]) if i.waiting]
    assert len(loaded) > 10
    overlap = sum(began[n + 1] < iterations[n].at for n in loaded)
    assert overlap > 0.8 * len(loaded)  # a thread may be held up between its two looks at the clock
    for n in loaded:
        assert n + 2 == len(began) or began[n + 2] > iterations[n].at - 1e-3


class SomeMask:
    """Allows one token; or nobody knows."""

    def __init__(self, token: int | None) -> None:
        self._token = token

    def words(self) -> NDArray[np.int32]:
        if self._token is None:
            raise NoMask("nobody knows")
        words = np.zeros((1, 4), np.int32)
        words[0, self._token // 32] = 1 << self._token % 32
        return words


def row(tokens: list[int], block: int, **fields: Any) -> RowInput:
    return RowInput(tokens, 0, [block], Sampling(GREEDY, len(tokens), **fields))


def test_masks_follow_to_where_tokens_are_chosen(ranks: ThreadRanks) -> None:
    masks = [SomeMask(17), SomeMask(None), SomeMask(42), None]
    step = StepInput([row([3, 4, 5], block, mask=mask) for block, mask in enumerate(masks)], 0)
    found = ranks.executor.run(step)
    assert [output.token_ids for output in found[:3]] == [(17,), (), (42,)]
    assert found[1].error == "nobody knows" and found[3].error is None and len(found[3].token_ids) == 1


@pytest.fixture
def two_stages(model: Path) -> Iterator[ThreadRanks]:
    with thread_ranks(config_of(model, pp=2, lease_seconds=0.8)) as running:
        yield running


def test_the_integers_arrive_before_the_stage_before_has_finished(
    two_stages: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later stage knows both steps while the first one still computes the first of them."""
    may_go, plain = threading.Event(), ModelRunner.hidden

    def hidden(self: ModelRunner, batch: Any, before: Any = None) -> Any:
        if threading.current_thread().name == "noria-stage-0":
            assert may_go.wait(10)
        return plain(self, batch, before)

    told: list[int] = []
    stage = two_stages.ranks[1]._stage
    assert stage is not None
    submit = stage.submit
    monkeypatch.setattr(ModelRunner, "hidden", hidden)
    monkeypatch.setattr(stage, "submit", lambda number, step: (told.append(number), submit(number, step)))
    steps = [StepInput([row([3, 4, 5 + i], i)], 0) for i in range(2)]
    for step in steps:
        two_stages.executor.submit(step)
    give_up = time.monotonic() + 10
    while len(told) < 2 and time.monotonic() < give_up:
        time.sleep(0.005)
    assert len(told) == 2 and not two_stages.executor._answers
    may_go.set()
    assert all(two_stages.executor.collect()[0].token_ids for _ in steps)


def test_only_the_last_stage_waits_for_its_device(two_stages: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads a float on the host would wait for a GPU; integers are on the host to begin with."""
    reads: Counter[str] = Counter()
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "to"):
        plain = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            if tensor.is_floating_point():
                reads[threading.current_thread().name] += 1
            return _plain(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for number in range(3):
        two_stages.executor.run(StepInput([row([3, 4, 5], number)], 0))
    assert reads["noria-stage-0"] == 0 and reads["noria-stage-1"] >= 3


@pytest.mark.parametrize("stage", [0, 1])
def test_a_fault_in_a_stage_is_the_steps_alone(
    stage: int, two_stages: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ModelRunner.hidden

    def hidden(self: ModelRunner, batch: Any, before: Any = None) -> Any:
        if threading.current_thread().name == f"noria-stage-{stage}" and 66 in batch.token_ids.tolist():
            raise ArithmeticError("planted")
        return plain(self, batch, before)

    monkeypatch.setattr(ModelRunner, "hidden", hidden)
    good, bad = StepInput([row([3, 4, 5], 0)], 0), StepInput([row([3, 66, 5], 1)], 0)
    want = two_stages.executor.run(good)
    for step in (good, bad):
        two_stages.executor.submit(step)
    assert two_stages.executor.collect() == want
    with pytest.raises(StepFailed, match="an earlier stage failed" if stage == 0 else "planted"):
        two_stages.executor.collect()
    assert two_stages.executor.run(good) == want


def test_a_shard_that_fails_amid_the_others_ends_them_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ModelRunner.hidden

    def hidden(self: ModelRunner, batch: Any, before: Any = None) -> Any:
        if threading.current_thread().name == "noria-stage-1" and 66 in batch.token_ids.tolist():
            raise ArithmeticError("planted")
        return plain(self, batch, before)

    monkeypatch.setattr(ModelRunner, "hidden", hidden)
    monkeypatch.setattr(ranks_module, "END_SECONDS", 0.1)  # threads cannot be killed
    with thread_ranks(config_of(model, tp=2, lease_seconds=0.8)) as running:
        with pytest.raises(RankLost, match="rank 1: ArithmeticError: planted"):
            running.executor.run(StepInput([row([3, 66, 5], 0)], 0))
        with pytest.raises(RankLost):
            running.executor.check()


def test_a_rank_that_ends_is_noticed_at_once(two_stages: ThreadRanks) -> None:
    two_stages.executor.run(StepInput([row([3, 4, 5], 0)], 0))
    two_stages.lines[1].close()
    started = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 ended"):
        two_stages.executor.run(StepInput([row([3, 4, 5], 0)], 0))
    assert time.monotonic() - started < 0.8


def test_a_rank_that_says_nothing_is_noticed_within_the_lease(
    two_stages: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_stages.ranks[1], "_take", lambda message: None)  # hears all, does nothing
    started = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 has said nothing for 0\.6 s"):
        for _ in range(2):  # it may have been about to take one message more
            two_stages.executor.run(StepInput([row([3, 4, 5], 0)], 0))
    assert time.monotonic() - started < 2


def test_a_rank_that_reads_nothing_is_noticed_while_a_step_is_on_its_way_to_it(
    two_stages: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step larger than what the system holds for who does not read: sending it does not end, nor would a ping."""
    asleep, may_go = threading.Event(), threading.Event()

    def sleep(message: object) -> None:
        asleep.set()
        may_go.wait()

    monkeypatch.setattr(two_stages.ranks[1], "_take", sleep)
    assert asleep.wait(5)  # over the next ping
    large = RowInput([3, 4, 5], 0, [0] * 2**20, Sampling(GREEDY, 3))
    started = time.monotonic()
    try:
        with pytest.raises(RankLost, match=r"rank 1 has said nothing for 0\.6 s"):
            two_stages.executor.run(StepInput([large], 0))
        assert time.monotonic() - started < 2.5
    finally:
        may_go.set()


def test_a_first_rank_that_stood_still_blames_nobody(two_stages: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped and gone on, or swapped out: it asked nobody meanwhile, so nobody answered."""
    stood_still, wait = threading.Event(), ranks_module.wait

    def slow(lines: Any, seconds: float) -> Any:
        if stood_still.is_set() or (found := wait(lines, seconds)):
            return wait(lines, seconds) if stood_still.is_set() else found
        time.sleep(1.0)
        stood_still.set()
        return []

    monkeypatch.setattr(ranks_module, "wait", slow)
    assert stood_still.wait(5)
    two_stages.executor.run(StepInput([row([3, 4, 5], 0)], 0))
    time.sleep(0.9)
    two_stages.executor.check()
