"""The iteration log: what it must show of requests that step in and out, and what it may cost."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from random import Random
from statistics import median

import pytest

from noria.engine.execution.step import RowOutput
from noria.engine.scheduling.kv_blocks import KVBlocks
from noria.engine.scheduling.policy import POLICIES
from noria.engine.scheduling.request import Request
from noria.engine.scheduling.scheduler import Scheduler
from noria.engine.trace import IterationLog, Times, TraceStart
from noria.trace_file import Trace, read, spans, summarise

TIMES = Times(select=50e-6, forward=0.04, exchange=0.001)


def start(policy: str = "paged", max_batch_size: int = 4, num_blocks: int = 12) -> TraceStart:
    return TraceStart("tiny", policy, max_batch_size, 32, 0, num_blocks, 4, time.time())


def new_scheduler(policy: str, max_batch_size: int = 4, num_blocks: int = 12, tokens: int = 32) -> Scheduler:
    return Scheduler(
        POLICIES[policy],
        KVBlocks(num_blocks, 4, prefix_cache=False),
        max_batch_size=max_batch_size,
        max_batch_tokens=tokens,
        max_model_len=num_blocks * 4,
    )


def step(scheduler: Scheduler, log: IterationLog) -> None:
    batch = scheduler.select()
    assert batch is not None
    outputs = [RowOutput((7,) if row.samples else ()) for row in batch.rows]
    scheduler.complete(batch, [output.token_ids for output in outputs])
    log.record(batch, outputs, scheduler, TIMES)


def requests(count: int, seed: int = 1) -> list[Request]:
    chance = Random(seed)
    made = []
    for index in range(count):
        prompt = chance.randint(1, 20)
        made.append(Request(f"r{index}", [3] * prompt, prompt, chance.randint(1, 24)))
    return made


def logged(policy: str, file: Path) -> tuple[Scheduler, Trace, list[Request]]:
    scheduler, log, coming = new_scheduler(policy), IterationLog(file, start(policy)), requests(16)
    for request in coming:
        scheduler.add(request)
    count = 0
    while len(scheduler):
        step(scheduler, log)
        count += 1
        if count == 6:  # one that runs and one that waits end from outside, between two iterations
            assert scheduler.cancel(scheduler.running[-1].id) and scheduler.cancel("r15")
    log.close()
    return scheduler, read(file), coming


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_request_steps_in_and_out_in_one_lane_at_a_time(policy: str, tmp_path: Path) -> None:
    scheduler, trace, coming = logged(policy, tmp_path / "log")
    assert {request.id for request in trace.requests.values()} == {f"r{i}" for i in range(15)}, "r15 never stepped"
    numbers = {request.id: number for number, request in trace.requests.items()}
    ends = Counter(number for iteration in trace.iterations for number, _ in iteration.ended)
    assert ends == dict.fromkeys(trace.requests, 1)
    reasons = dict(end for iteration in trace.iterations for end in iteration.ended)
    assert {r.id: reasons[numbers[r.id]] for r in coming[:15]} == {r.id: r.finish for r in coming[:15]}
    sampled: Counter[int] = Counter()
    for row in (row for iteration in trace.iterations for row in iteration.rows if row.phase != "-"):
        sampled[row.request] += row.num_sampled
    assert {r.id: sampled[numbers[r.id]] for r in coming[:15]} == {r.id: r.num_output for r in coming[:15]}
    inside: dict[int, int] = {}  # request -> lane
    for iteration in trace.iterations:
        lanes = [row.lane for row in iteration.rows]
        assert len(set(lanes)) == len(lanes) and max(lanes) < 4
        assert iteration.num_tokens == sum(row.num_tokens for row in iteration.rows)
        assert iteration.blocks_used + iteration.blocks_free == 12
        for row in iteration.rows:
            assert inside.setdefault(row.request, row.lane) == row.lane, "a request keeps its lane"
        for number in [number for number, _ in iteration.ended] + iteration.preempted:
            inside.pop(number, None)
        assert len(set(inside.values())) == len(inside)
    assert not inside
    assert sum(len(iteration.preempted) for iteration in trace.iterations) == scheduler.preemptions.total
    assert (policy == "paged") == (scheduler.preemptions.total > 0)
    assert (policy == "static") == any(span.phase == "-" for span in spans(trace))


def test_figures_add_up(tmp_path: Path) -> None:
    _, trace, coming = logged("orca", tmp_path / "log")
    summary = summarise(trace)
    assert summary.output_tokens == sum(request.num_output for request in coming[:15])
    assert summary.prompt_tokens == sum(request.num_prompt for request in coming[:15])
    assert summary.step_median == pytest.approx(0.04) and summary.exchange_median == pytest.approx(0.001)
    assert 0 < summary.occupancy == summary.mean_rows / 4 <= 1 and summary.kv_mean <= summary.kv_peak <= 1


def test_engines_that_were_told_one_file_number_theirs_and_a_restart_appends(tmp_path: Path) -> None:
    logs = [IterationLog(tmp_path / "log.jsonl", start()) for _ in range(3)]
    assert [log.path.name for log in logs] == ["log.jsonl", "log-2.jsonl", "log-3.jsonl"]
    for log in logs:
        scheduler = new_scheduler("paged")
        scheduler.add(Request("r", [1], 1, 2))
        step(scheduler, log)
        log.close()
    again = IterationLog(tmp_path / "log.jsonl", start("orca"))
    scheduler = new_scheduler("orca")
    scheduler.add(Request("again", [1], 1, 1))
    step(scheduler, again)
    again.close()
    assert (tmp_path / "log.jsonl").read_text().count('"start"') == 2
    last = read(tmp_path / "log.jsonl")
    assert last.start.policy == "orca" and last.requests[0].id == "again"


def test_a_full_disk_ends_the_log_and_not_the_engine() -> None:
    log = IterationLog(Path("/dev/full"), start())
    scheduler = new_scheduler("paged")
    scheduler.add(Request("r", [1], 1, 30))
    while len(scheduler):
        step(scheduler, log)
    log.close()


def test_a_file_that_cannot_be_written_is_told_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--trace-iterations .*no such file"):
        IterationLog(tmp_path / "absent" / "log", start())


def test_an_iteration_of_64_rows_pays_little(tmp_path: Path) -> None:
    """The loop's part is under a hundredth of a 10 ms iteration: on a CPU one of 64 rows takes ten times as long."""
    scheduler = new_scheduler("paged", 64, 64 * 16, tokens=64)
    log = IterationLog(tmp_path / "log", start(max_batch_size=64, num_blocks=64 * 16))
    for index in range(64):
        scheduler.add(Request(f"r{index}", [1], 1, 60))
    costs = []
    for _ in range(50):
        batch = scheduler.select()
        assert batch is not None
        outputs = [RowOutput((7,)) for _ in batch.rows]
        scheduler.complete(batch, [output.token_ids for output in outputs])
        began = time.thread_time()
        log.record(batch, outputs, scheduler, TIMES)
        costs.append(time.thread_time() - began)
        time.sleep(0.001)
    log.close()
    assert len(read(tmp_path / "log").iterations[-1].rows) == 64
    assert median(costs) < 100e-6
