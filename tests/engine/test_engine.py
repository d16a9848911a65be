"""The loop over a real store: real scheduler, executor and broker; only the model is a function of the tokens."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import redis
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from noria.engine.engine import Engine
from noria.engine.execution.executor import LocalExecutor
from noria.engine.execution.sampler import sample
from noria.engine.execution.step import RowInput, RowOutput, StepInput
from noria.engine.grammar.grammars import Grammars
from noria.engine.grammar.matcher import CompiledGrammar
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.wire.broker import EngineBroker, GatewayBroker
from noria.engine.wire.messages import (
    FinishReason,
    GenerationRequest,
    Grammar,
    ModelCard,
    SamplingParams,
    TokenFrame,
    TokenizerFiles,
)
from noria.engine.wire.tokenizer import Tokenizer

BAD, BROKEN_LOGITS, EOS = 666, 667, 999
CARD = ModelCard(
    id="tiny",
    aliases=(),
    created=1,
    max_model_len=512,
    vocab_size=1000,
    kv_tokens=64 * 16,
    block_size=16,
    eos_token_ids=(EOS,),
    reserve_output=False,
    policy="paged",
    fingerprint="fp",
)


def byte_files() -> TokenizerFiles:
    """Ids 0 to 255 are bytes; the model's other ids mean nothing."""
    vocab = {symbol: place for place, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return TokenizerFiles(inner.to_str(), None, None, None, False)


FILES = byte_files()
TOKENIZER = Tokenizer.load(FILES)


def next_token(last: int) -> int:
    """The model: each token is followed by one more; 499 by the end of the sequence."""
    return EOS if last == 499 else last + 1


class TinyModel:
    """Fails whole iterations that hold the token BAD, and gives broken logits to rows that hold BROKEN_LOGITS. The
    vector of a pooled row is its token ids, one after the other. Rows with a grammar get logits of noise and the real
    sampler."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.pace = 0.0

    def execute(self, step: StepInput) -> list[RowOutput]:
        time.sleep(self.pace)
        self.batch_sizes.append(len(step.rows))
        if any(BAD in row.token_ids for row in step.rows):
            raise ArithmeticError("planted fault")
        return [self._output(row) for row in step.rows]

    def _output(self, row: RowInput) -> RowOutput:
        if BROKEN_LOGITS in row.token_ids:
            return RowOutput(error="planted")
        if row.pooling:
            return RowOutput(pooled=row.pooling.carried + array("i", row.token_ids).tobytes())
        if row.sampling is not None and row.sampling.mask is not None:
            noise = torch.Generator().manual_seed(row.sampling.position)
            return sample(torch.randn(1, CARD.vocab_size, generator=noise), [row.sampling])[0]
        return RowOutput((next_token(row.token_ids[-1]),) if row.sampling else ())


class RunningEngine:
    def __init__(
        self,
        url: str,
        *,
        lease_seconds: float = 5.0,
        executor: type[LocalExecutor] = LocalExecutor,
        policy: str = "paged",
        grammars: Grammars | None = None,
    ) -> None:
        self.model = TinyModel()
        self.scheduler = Scheduler(
            POLICIES[policy],
            KVBlocks(64, 16, policy == "paged"),
            max_batch_size=8,
            max_batch_tokens=64,
            max_model_len=512,
            num_stages=executor.depth,
        )
        self.executor = executor(self.model.execute)
        self.broker = EngineBroker(url, "tiny", lease_seconds=lease_seconds)
        self.broker.register(CARD, FILES)
        grammars = grammars or Grammars(FILES, vocab_size=CARD.vocab_size, stop_token_ids=CARD.eos_token_ids)
        self.engine = Engine(self.scheduler, self.executor, self.broker, CARD, grammars)
        self._stop, self.hurry = threading.Event(), threading.Event()
        self._drain_seconds = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.engine.step()
        self.engine.run(self._stop, self.hurry, self._drain_seconds)

    def drain(self, seconds: float) -> None:
        """What the first signal does."""
        self._drain_seconds = seconds
        self._stop.set()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.executor.close()

    def halt(self) -> None:
        """Stop turning, as a process that dies would; the lease stays until it lapses."""
        self._stop.set()
        self.join()

    def stop(self) -> None:
        self.halt()
        self.broker.close()


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    binary = shutil.which("redis-server")
    assert binary, "redis-server is needed"
    folder = Path(tempfile.mkdtemp(prefix="noria-", dir="/tmp"))  # short: a socket's path has 107 bytes
    socket = folder / "s"
    process = subprocess.Popen([binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)])
    client = redis.Redis(unix_socket_path=str(socket))
    until = time.monotonic() + 10
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            assert time.monotonic() < until
            time.sleep(0.02)
    yield f"unix://{socket}"
    client.close()
    process.terminate()
    process.wait(10)
    shutil.rmtree(folder)


class Client:
    """A gateway's face without HTTP."""

    def __init__(self, broker: GatewayBroker) -> None:
        self.broker = broker
        self._frames = broker.frames()
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, TokenFrame] = {}

    async def send(self, request_id: str, prompt: list[int], **fields: object) -> None:
        sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0, **fields.pop("sampling", {})})  # type: ignore[arg-type,dict-item]
        request = GenerationRequest(request_id, "tiny", prompt, sampling, self.broker.boot_id, **fields)  # type: ignore[arg-type]
        await self.broker.enqueue(request, CARD)

    async def read(self, until: Callable[[], bool]) -> None:
        while not until():
            for frame in await anext(self._frames):
                known = self.tokens.setdefault(frame.request_id, [])
                assert frame.seq <= len(known), "a gap"
                known += frame.token_ids[len(known) - frame.seq :]
                assert frame.request_id not in self.last, "two ends"
                if frame.finish is not None:
                    self.last[frame.request_id] = frame

    async def ends(self, *request_ids: str) -> list[FinishReason | None]:
        await self.read(lambda: all(i in self.last for i in request_ids))
        return [self.last[i].finish for i in request_ids]


@pytest.fixture
async def client(store: str):  # type: ignore[no-untyped-def]
    redis.Redis.from_url(store).flushall()
    broker = GatewayBroker(store)
    await broker.start()
    yield Client(broker)
    await broker.close()


@pytest.fixture
def engine(client: Client, store: str) -> Iterator[RunningEngine]:
    running = RunningEngine(store)
    yield running
    running.stop()


async def test_requests_end_with_their_own_tokens(client: Client, engine: RunningEngine) -> None:
    for i in range(20):
        await client.send(f"r{i}", [10 * i], sampling={"max_tokens": 1 + i % 7})
    assert await client.ends(*(f"r{i}" for i in range(20))) == ["length"] * 20
    for i in range(20):
        assert client.tokens[f"r{i}"] == list(range(10 * i + 1, 10 * i + 2 + i % 7))
    engine.scheduler.check()


async def test_the_end_token_ends_and_is_counted(client: Client, engine: RunningEngine) -> None:
    await client.send("stop", [497], sampling={"max_tokens": 50})
    await client.send("stop id", [10], sampling={"max_tokens": 50, "stop_token_ids": (13,)})
    assert await client.ends("stop", "stop id") == ["stop", "stop"]
    assert client.tokens == {"stop": [498, 499, EOS], "stop id": [11, 12, 13]}
    usage = client.last["stop"].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (1, 3)


async def test_a_late_short_request_leaves_before_an_early_long_one(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.005
    await client.send("long", [10], sampling={"max_tokens": 200})
    await client.read(lambda: len(client.tokens.get("long", [])) > 5)
    await client.send("short", [300], sampling={"max_tokens": 5})
    await client.ends("short")
    assert "long" not in client.last
    await client.ends("long")
    assert max(engine.model.batch_sizes) == 2


async def test_a_priority_request_takes_a_slot_from_a_full_batch(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.005
    low = [f"low{i}" for i in range(8)]
    for i, name in enumerate(low):
        await client.send(name, [10 * i], sampling={"max_tokens": 60}, service_class="batch")
    await client.read(lambda: all(len(client.tokens.get(name, [])) > 3 for name in low))
    await client.send("same class", [400], service_class="batch")
    await client.send("urgent", [300], sampling={"max_tokens": 5}, service_class="priority")
    assert await client.ends("urgent") == ["length"]
    assert len(client.last) == 1 and "same class" not in client.tokens, "nobody else's end made room for it"
    assert await client.ends(*low, "same class") == ["length"] * 9
    for i, name in enumerate(low):
        assert client.tokens[name] == list(range(10 * i + 1, 10 * i + 61))
    stats = engine.engine.statistics.record()
    assert (stats.class_preemptions_total, stats.memory_preemptions_total) == (1, 0)
    assert stats.recomputed_tokens_total > 0


async def test_a_fault_ends_its_own_request_and_no_other(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.002
    for i in range(4):
        await client.send(f"good{i}", [10 * i], sampling={"max_tokens": 30})
    await client.read(lambda: len(client.tokens.get("good3", [])) > 3)
    await client.send("raises", [5, BAD, 7])
    await client.send("nan", [5, BROKEN_LOGITS, 7])
    assert await client.ends("raises", "nan") == ["error", "error"]
    assert client.last["raises"].error and client.last["nan"].error
    assert await client.ends(*(f"good{i}" for i in range(4))) == ["length"] * 4
    for i in range(4):
        assert client.tokens[f"good{i}"] == list(range(10 * i + 1, 10 * i + 31))
    engine.scheduler.check()


async def test_what_can_never_fit_is_told_and_harms_nobody(client: Client, engine: RunningEngine) -> None:
    await client.send("huge", [1] * 400, sampling={"max_tokens": 400})
    await client.send("fine", [1])
    assert await client.ends("huge", "fine") == ["error", "length"]
    assert "800" in (client.last["huge"].error or "") and "512" in (client.last["huge"].error or "")


async def test_cancel_frees_the_slot_at_the_next_iteration(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.01
    await client.send("long", [10], sampling={"max_tokens": 400, "ignore_eos": True})
    await client.read(lambda: len(client.tokens.get("long", [])) > 3)
    await client.broker.cancel("tiny", "long")
    assert await client.ends("long") == ["cancelled"]
    assert len(client.tokens["long"]) < 100
    assert engine.scheduler.kv.num_held == 0


async def test_a_deadline_ends_a_running_request(client: Client, engine: RunningEngine) -> None:
    engine.model.pace = 0.01
    deadline = int(time.time() * 1000) + 300
    await client.send("late", [10], sampling={"max_tokens": 400}, deadline_ms=deadline)
    assert await client.ends("late") == ["expired"]
    assert client.tokens["late"]


async def test_max_tokens_zero_computes_the_prompt_and_ends(client: Client, engine: RunningEngine) -> None:
    await client.send("zero", list(range(100)), sampling={"max_tokens": 0})
    assert await client.ends("zero") == ["length"]
    assert client.tokens["zero"] == []


@pytest.mark.parametrize("kind", ["mean", "last"])
async def test_a_vector_comes_with_the_end_beside_running_streams(
    client: Client, engine: RunningEngine, kind: str
) -> None:
    prompt = [7] * 150  # three chunks; the second time the blocks of all but the last tokens are known
    await client.send("stream", [10], sampling={"max_tokens": 40})
    for name in ("one", "two"):
        await client.send(name, prompt, pooling=kind, sampling={"max_tokens": 0})
        assert await client.ends(name) == ["stop"]
    assert await client.ends("stream") == ["length"] and client.last["stream"].embedding is None
    seen = [list(array("i", client.last[name].embedding or b"")) for name in ("one", "two")]
    # A mean is of every position, whatever the prefix cache holds; the last one may start behind it.
    assert seen == ([prompt, prompt] if kind == "mean" else [[7] * len(vector) for vector in seen])
    assert kind == "mean" or all(0 < len(vector) <= 64 for vector in seen)
    cached = [usage.cached_tokens for name in ("one", "two") if (usage := client.last[name].usage)]
    assert cached == ([0, 0] if kind == "mean" else [0, 144])
    assert client.tokens["one"] == [] and client.last["one"].usage.prompt_tokens == 150  # type: ignore[union-attr]
    engine.scheduler.check()


async def test_a_vector_that_cannot_be_computed_is_an_error(client: Client, engine: RunningEngine) -> None:
    await client.send("nan", [5, BROKEN_LOGITS, 7], pooling="mean", sampling={"max_tokens": 0})
    await client.send("kind", [5], pooling="cls", sampling={"max_tokens": 0})
    await client.send("fine", [5], pooling="mean", sampling={"max_tokens": 0})
    assert await client.ends("nan", "kind", "fine") == ["error", "error", "stop"]
    assert "cls" in (client.last["kind"].error or "")


async def test_another_engine_reads_a_pooled_prompt_from_its_start(client: Client, store: str) -> None:
    first = RunningEngine(store, lease_seconds=0.6)
    first.model.pace = 0.1
    prompt = list(range(400))
    await client.send("r", prompt, pooling="mean", sampling={"max_tokens": 0})
    while len(first.model.batch_sizes) < 3:
        await asyncio.sleep(0.01)
    first.halt()
    second = RunningEngine(store)
    try:
        while not await client.broker.reap("tiny"):
            await asyncio.sleep(0.05)
        assert await client.ends("r") == ["stop"]
        assert list(array("i", client.last["r"].embedding or b"")) == prompt
    finally:
        second.stop()
        first.broker.close()


async def test_another_engine_goes_on_where_one_died(client: Client, store: str) -> None:
    first = RunningEngine(store, lease_seconds=0.6)
    first.model.pace = 0.005
    for i in range(3):
        await client.send(f"r{i}", [100 * i], sampling={"max_tokens": 120})
    await client.read(lambda: len(client.tokens.get("r2", [])) > 10)
    first.halt()
    second = RunningEngine(store)
    try:
        reaped = 0
        while reaped < 3:
            reaped += await client.broker.reap("tiny")
        assert await client.ends("r0", "r1", "r2") == ["length"] * 3
        for i in range(3):
            assert client.tokens[f"r{i}"] == list(range(100 * i + 1, 100 * i + 121))
    finally:
        second.stop()
        first.broker.close()


async def test_stopping_hands_back_what_is_unfinished(client: Client, store: str) -> None:
    first = RunningEngine(store)
    first.model.pace = 0.005
    await client.send("r", [10], sampling={"max_tokens": 150})
    await client.read(lambda: len(client.tokens.get("r", [])) > 10)
    first.stop()
    second = RunningEngine(store)
    try:
        assert await client.ends("r") == ["length"]
        assert client.tokens["r"] == list(range(11, 161))
    finally:
        second.stop()


async def test_gauges_fall_to_zero_when_idle(client: Client, engine: RunningEngine) -> None:
    await client.send("r", [10])
    await client.ends("r")
    until = time.monotonic() + 5
    while True:
        (status,) = await client.broker.models()
        (stats,) = status.engines.values()
        if stats.generation_tokens_total == 8 and stats.running == stats.batch_size == stats.kv_blocks_used == 0:
            break
        assert time.monotonic() < until, stats
        time.sleep(0.05)
    assert stats.prompt_tokens_total == 1 and stats.requests_finished_total == 1 and stats.iterations_total >= 8
    assert sum(stats.iteration_seconds) == sum(stats.iteration_rows) == stats.iterations_total
    assert stats.iteration_rows_sum >= 8 and 0 < stats.select_seconds_total < stats.iteration_seconds_sum
    assert stats.exchange_seconds_total > 0


class DeepExecutor(LocalExecutor):
    """Two iterations out at once, as with two pipeline stages."""

    depth = 2


async def test_draining_claims_nothing_and_finishes_what_runs(client: Client, store: str) -> None:
    first = RunningEngine(store)
    first.model.pace = 0.01
    await client.send("running", [10], sampling={"max_tokens": 60})
    await client.read(lambda: len(client.tokens.get("running", [])) > 5)
    first.drain(20)
    await client.send("late", [300], sampling={"max_tokens": 5})
    assert await client.ends("running") == ["length"]
    first.join()
    assert "late" not in client.tokens and first.engine.num_held == 0
    first.broker.close()
    second = RunningEngine(store)
    try:
        assert await client.ends("late") == ["length"]
    finally:
        second.stop()
    assert client.tokens["running"] == list(range(11, 71))


async def test_what_outlives_the_drain_goes_on_elsewhere(client: Client, store: str) -> None:
    first = RunningEngine(store)
    first.model.pace = 0.01
    await client.send("r", [10], sampling={"max_tokens": 150})
    await client.read(lambda: len(client.tokens.get("r", [])) > 5)
    first.drain(0.2)
    first.join()
    assert first.engine.num_held == 1
    first.broker.close()
    second = RunningEngine(store)
    try:
        assert await client.ends("r") == ["length"]
        assert client.tokens["r"] == list(range(11, 161))
    finally:
        second.stop()
    assert redis.Redis.from_url(store).xlen("noria:{tiny}:dead") == 0


async def test_a_second_signal_cuts_the_drain_short(client: Client, store: str) -> None:
    first = RunningEngine(store)
    first.model.pace = 0.01
    await client.send("r", [10], sampling={"max_tokens": 400, "ignore_eos": True})
    await client.read(lambda: len(client.tokens.get("r", [])) > 5)
    first.drain(60)
    await client.read(lambda: len(client.tokens["r"]) > 20)
    first.hurry.set()
    first.join()
    assert first.engine.num_held == 1 and "r" not in client.last
    first.broker.close()


@pytest.mark.parametrize("policy", ["paged", "static"])
async def test_a_request_that_comes_back_while_its_old_row_is_out(client: Client, store: str, policy: str) -> None:
    """The engine loses its lease with two iterations out, and gets the same requests again."""
    running = RunningEngine(store, executor=DeepExecutor, policy=policy)
    running.model.pace = 0.01
    try:
        await client.send("short", [300], sampling={"max_tokens": 10})
        await client.send("long", [10], sampling={"max_tokens": 200})
        await client.read(lambda: len(client.tokens.get("long", [])) > 15)
        direct = redis.Redis.from_url(store)
        for _ in range(3):
            known = len(client.tokens["long"])
            for key in direct.keys("noria:{tiny}:request:*"):
                direct.hset(key, "attempts", 0)  # else the second death would be the last
            direct.zadd("noria:{tiny}:engines", {running.broker.engine_id: 1})
            await client.broker.reap("tiny")
            await client.read(lambda known=known: len(client.tokens["long"]) > known + 10)  # type: ignore[misc]
        assert await client.ends("long", "short") == ["length", "length"]
        assert client.tokens == {"long": list(range(11, 211)), "short": list(range(301, 311))}
        running.scheduler.check()
        assert not running.engine._live and running.scheduler.kv.num_held == 0
    finally:
        running.stop()


async def test_requests_of_a_dead_gateway_do_not_hold_up_the_living(client: Client, store: str) -> None:
    dead = GatewayBroker(store)
    await dead.start()
    ghosts = [
        GenerationRequest(f"ghost{i}", "tiny", [10], SamplingParams(max_tokens=400, ignore_eos=True), dead.boot_id)
        for i in range(40)
    ]
    for ghost in ghosts:
        await dead.enqueue(ghost, CARD)
    await dead.close()
    redis.Redis.from_url(store).delete(f"noria:frames:{dead.boot_id}")
    running = RunningEngine(store)
    running.model.pace = 0.02
    try:
        await client.send("living", [10])
        async with asyncio.timeout(15):
            assert await client.ends("living") == ["length"]
        # Eight ghosts were computed until the first of them told that nobody listens, the rest never.
        assert sum(running.model.batch_sizes) < 8 * 3.5 / 0.02
    finally:
        running.stop()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(FILES, vocab_size=CARD.vocab_size, stop_token_ids=CARD.eos_token_ids, seconds=20)
    yield found
    found.close()


class HeldGrammars(Grammars):
    """Its grammars are compiled for as long as the test wants."""

    def __init__(self, real: Grammars) -> None:
        super().__init__(FILES, vocab_size=CARD.vocab_size, stop_token_ids=CARD.eos_token_ids, seconds=20)
        self._real = real
        self._held: list[tuple[Future[CompiledGrammar], Grammar]] = []

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        self._held.append((Future(), grammar))
        return self._held[-1][0]

    def release(self) -> None:
        for future, grammar in self._held:
            future.set_result(self._real.compile(grammar).result(60))


def shaped(regex: str, **sampling: object) -> dict[str, object]:
    return {"max_tokens": 100, "grammar": Grammar("regex", regex, "guided_regex"), **sampling}


async def test_a_grammar_shapes_its_own_request_and_ends_it(client: Client, store: str, grammars: Grammars) -> None:
    running = RunningEngine(store, grammars=grammars)
    try:
        for i in range(3):
            await client.send(f"plain{i}", [10 * i], sampling={"max_tokens": 12})
            await client.send(f"shaped{i}", [5 + i], sampling=shaped("[a-z]{3}-[0-9]{2}", temperature=1, seed=i))
        await client.send("cut", [5], sampling=shaped("[a-z]+", max_tokens=4, temperature=1, logit_bias={EOS: -100.0}))
        # A fulfilled grammar ends its request whatever else says that it must go on.
        await client.send("on", [5], sampling=shaped("ab", min_tokens=50, ignore_eos=True))
        assert await client.ends(*(f"plain{i}" for i in range(3)), "cut") == ["length"] * 4
        assert await client.ends(*(f"shaped{i}" for i in range(3)), "on") == ["stop"] * 4
        for i in range(3):
            assert client.tokens[f"plain{i}"] == list(range(10 * i + 1, 10 * i + 13))
            *text, end = client.tokens[f"shaped{i}"]
            assert end == EOS and re.fullmatch("[a-z]{3}-[0-9]{2}", TOKENIZER.decode(text))
        assert client.tokens["on"] == [*TOKENIZER.encode("ab"), EOS]
        running.scheduler.check()
    finally:
        running.stop()


async def test_a_bad_grammar_ends_its_own_request_and_names_the_field(
    client: Client, store: str, grammars: Grammars
) -> None:
    running = RunningEngine(store, grammars=grammars)
    try:
        await client.send("bad", [5], sampling=shaped("(a"))
        await client.send("nothing", [5], sampling=shaped("a"), cache_salt="x")
        assert await client.ends("bad", "nothing") == ["error", "stop"]
        assert client.last["bad"].error_param == "guided_regex" and "parenthesis" in str(client.last["bad"].error)
    finally:
        running.stop()


async def test_who_waits_for_a_grammar_holds_up_nobody_and_can_be_ended(
    client: Client, store: str, grammars: Grammars
) -> None:
    held = HeldGrammars(grammars)
    running = RunningEngine(store, grammars=held)
    running.model.pace = 0.002
    try:
        await client.send("gone", [5], sampling=shaped("a"))
        await client.send("late", [5], sampling=shaped("b"), deadline_ms=int(time.time() * 1000) + 400)
        await client.send("patient", [5], sampling=shaped("[0-9]{4}"))
        await client.send("plain", [10], sampling={"max_tokens": 50})
        assert await client.ends("plain") == ["length"]
        assert running.engine.num_held >= 2 and "gone" not in client.last
        await client.broker.cancel("tiny", "gone")
        assert await client.ends("gone", "late") == ["cancelled", "expired"]
        await client.send("after", [20])
        assert await client.ends("after") == ["length"] and "patient" not in client.last
        held.release()
        assert await client.ends("patient") == ["stop"]
        assert running.engine.num_held == 0
    finally:
        running.stop()
        held.close()


async def test_a_drain_waits_for_a_grammar_and_hands_back_what_never_came(
    client: Client, store: str, grammars: Grammars
) -> None:
    held = HeldGrammars(grammars)
    first = RunningEngine(store, grammars=held)
    await client.send("r", [5], sampling=shaped("[0-9]{4}"))
    until = time.monotonic() + 10
    while first.engine.num_held == 0:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    first.drain(0.2)
    first.join()
    first.broker.close()
    held.close()
    second = RunningEngine(store, grammars=grammars)
    try:
        assert await client.ends("r") == ["stop"]
    finally:
        second.stop()


async def test_another_engine_goes_on_in_the_middle_of_a_grammar(
    client: Client, store: str, grammars: Grammars
) -> None:
    sampling = shaped("([a-c][0-9]){30}", temperature=1, seed=3)
    first = RunningEngine(store, lease_seconds=0.6, grammars=grammars)
    await client.send("whole", [5], sampling=sampling)
    assert await client.ends("whole") == ["stop"]
    first.model.pace = 0.01
    await client.send("broken", [5], sampling=sampling)
    await client.read(lambda: len(client.tokens.get("broken", [])) > 10)
    first.halt()
    second = RunningEngine(store, grammars=grammars)
    try:
        while not await client.broker.reap("tiny"):
            pass
        assert await client.ends("broken") == ["stop"]
        assert len(client.tokens["broken"]) == 61
        assert client.tokens["broken"] == client.tokens["whole"]
    finally:
        second.stop()
        first.broker.close()
