"""One request's way through the store: enqueue, claim, frames, finish, cancel, expiry; nothing is left behind."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from noria.engine.wire import connection
from noria.engine.wire.backpressure import QueueLimits
from noria.engine.wire.broker import BrokerUnavailable, EngineBroker, GatewayBroker, QueueFull, redact
from noria.engine.wire.messages import CLASSES, EngineStats, FinishReason, TokenFrame

MODEL = "demo/model"
LOOKED = {"noria:{demo/model}:last_look"}
"""There from the gateway's first look for lapsed leases on, a second after its start."""


def now_ms(server) -> int:
    seconds, micros = server.client.time()
    return seconds * 1000 + micros // 1000


async def test_a_request_is_claimed_streams_and_leaves_nothing(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine()
    step(engine)
    resting = server.key_names() | LOOKED
    request = make_request("r1", prompt=40)
    await gateway.enqueue(request, card)
    (claimed,) = step(engine, max_requests=4).claimed
    assert (claimed.request, claimed.epoch, claimed.delivered) == (request, 1, [])
    step(engine, row(claimed, 0, [7]))
    step(engine, row(claimed, 1, [8, 9]))
    step(engine, row(claimed, 3, [2], FinishReason.STOP))
    (last,) = await reader.last_of("r1")
    assert [f.token_ids for f in reader.all] == [[7], [8, 9], [2]]
    assert [f.seq for f in reader.all] == [0, 1, 3]
    assert (last.finish, last.usage.prompt_tokens, last.usage.completion_tokens) == (FinishReason.STOP, 40, 4)
    assert server.key_names() | LOOKED == resting
    assert step(engine, max_requests=4).claimed == []


async def test_enqueue_is_idempotent_and_bounded(server, make_engine, make_request, step, card):
    gateway = GatewayBroker(server.url, limits=QueueLimits(depth=2, size=100_000))
    for request_id in ("a", "a", "b", "a"):
        await gateway.enqueue(make_request(request_id), card)
    with pytest.raises(QueueFull) as full:
        await gateway.enqueue(make_request("c"), card)
    assert 0 < full.value.retry_after <= 60
    assert [c.request.id for c in step(make_engine(), max_requests=9).claimed] == ["a", "b"]
    with pytest.raises(QueueFull):
        await gateway.enqueue(make_request("big", prompt=60_000), card)
    await gateway.enqueue(make_request("c"), card)
    with pytest.raises(ValueError, match="vip"):
        await gateway.enqueue(make_request("d", service_class="vip"), card)
    await gateway.close()


async def test_claim_takes_only_what_fits_and_looks_past_a_head_for_a_while(
    gateway, make_engine, make_request, step, row, card
):
    engine = make_engine(max_passed=0.3)
    for request_id, prompt in (("small0", 15), ("big", 159), ("small1", 15), ("small2", 15), ("small3", 15)):
        await gateway.enqueue(make_request(request_id, prompt=prompt), card)
    assert [c.request.id for c in step(engine, max_requests=1, max_blocks=9).claimed] == ["small0"]
    assert [c.request.id for c in step(engine, max_requests=1, max_blocks=9).claimed] == ["small1"]  # passes `big`
    await asyncio.sleep(0.35)
    assert step(engine, max_requests=9, max_blocks=9).claimed == []  # the head has waited long enough
    assert [c.request.id for c in step(engine, max_requests=9, max_blocks=11).claimed] == ["big", "small2"]
    assert step(engine, max_requests=9, max_blocks=0).claimed == []
    assert [c.request.id for c in step(engine, max_requests=9).claimed] == ["small3"]


async def test_a_class_with_more_room_is_claimed_past_those_with_none(gateway, make_engine, make_request, step, card):
    engine = make_engine()
    for name, service_class, prompt in (
        ("batch", "batch", 4),
        ("large", "default", 200),
        ("default", "default", 4),
        ("priority0", "priority", 40),
        ("priority1", "priority", 40),
        ("priority2", "priority", 4),
    ):
        await gateway.enqueue(make_request(name, service_class=service_class, prompt=prompt), card)

    def claim(requests: list[int], blocks: list[int]) -> list[str]:
        return [c.request.id for c in step(engine, max_requests=requests, max_blocks=blocks).claimed]

    assert claim([0, 0, 0, 0], [9, 9, 9, 9]) == claim([9, 9, 9, 9], [0, 0, 0, 0]) == []
    assert claim([1, 0, 0, 0], [9, 0, 0, 0]) == ["priority0"]
    assert claim([1, 1, 0, 0], [5, 4, 0, 0]) == ["default"]  # fair turns as ever; what one takes no other has
    assert claim([2, 1, 1, 0], [4, 2, 2, 0]) == ["priority1", "priority2"]
    assert claim([1, 1, 1, 1], [99, 99, 99, 99]) == ["large"]
    assert claim([1, 1, 1, 1], [99, 99, 99, 99]) == ["batch"]


async def test_look_ahead_is_bounded(gateway, make_engine, make_request, step, card):
    for i in range(40):
        await gateway.enqueue(make_request(f"big{i:02}", prompt=159), card)
    await gateway.enqueue(make_request("small", prompt=1), card)
    assert step(make_engine(), max_requests=40, max_blocks=9).claimed == []


async def test_an_idle_engine_takes_in_the_end_what_can_never_fit(gateway, make_engine, make_request, step, card):
    engine = make_engine(max_passed=0.0)
    await gateway.enqueue(make_request("huge", prompt=10_000), card)
    assert step(engine, max_requests=1, max_blocks=9).claimed == []
    assert [c.request.id for c in step(engine, max_requests=1, max_blocks=9).claimed] == ["huge"]


async def test_reserved_output_costs_blocks(gateway, make_engine, make_request, step, card):
    reserving = type(card)(**{f: getattr(card, f) for f in card.__struct_fields__} | {"reserve_output": True})
    await gateway.enqueue(make_request("r", prompt=16, max_tokens=33), reserving)  # 49 tokens: 4 blocks
    engine = make_engine()
    assert step(engine, max_requests=1, max_blocks=3).claimed == []
    assert len(step(engine, max_requests=1, max_blocks=4).claimed) == 1


async def test_cancel_in_each_state(server, gateway, make_engine, make_request, reader, step, row, card):
    engine = make_engine()
    step(engine)
    resting = server.key_names() | LOOKED
    for request_id in ("queued", "running"):
        await gateway.enqueue(make_request(request_id, prompt=5), card)
    await gateway.cancel(MODEL, "queued")
    (last,) = await reader.last_of("queued")
    assert (last.finish, last.usage.prompt_tokens, last.usage.completion_tokens) == (FinishReason.CANCELLED, 5, 0)
    (claimed,) = step(engine, max_requests=9).claimed
    await gateway.cancel(MODEL, "running")
    await gateway.cancel(MODEL, "running")
    assert step(engine).cancelled == ["running"]
    assert step(engine).cancelled == []
    step(engine, row(claimed, 0, [], FinishReason.CANCELLED))
    await reader.last_of("running")
    await gateway.cancel(MODEL, "running")
    await gateway.cancel(MODEL, "never seen")
    assert step(engine, max_requests=9) == type(step(engine))()
    assert server.key_names() | LOOKED == resting


async def test_cancelled_and_put_back_does_not_run_again(
    server, gateway, make_engine, make_request, reader, step, card
):
    engine, other = make_engine(), make_engine()
    await gateway.enqueue(make_request("r"), card)
    step(engine, max_requests=1)
    await gateway.cancel(MODEL, "r")
    engine.close()
    assert (await reader.last_of("r"))[0].finish is FinishReason.CANCELLED
    assert step(other, max_requests=1).claimed == []


@pytest.mark.parametrize("dropped_by", ["claim", "reap"])
async def test_a_deadline_in_the_queue_ends_with_a_frame(
    server, gateway, make_engine, make_request, reader, step, card, dropped_by
):
    engine = make_engine()
    step(engine)
    resting = server.key_names() | LOOKED
    await gateway.enqueue(make_request("late", deadline_ms=now_ms(server) - 1), card)
    await gateway.enqueue(make_request("early", deadline_ms=now_ms(server) + 60_000), card)
    if dropped_by == "claim":
        assert [c.request.id for c in step(engine, max_requests=9).claimed] == ["early"]
    else:
        assert await gateway.reap(MODEL) == 0
        await gateway.cancel(MODEL, "early")
        assert server.key_names() - resting == set()
    assert (await reader.last_of("late"))[0].finish is FinishReason.EXPIRED


async def test_a_vanished_gateway_is_named_after_a_grace(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine(gone_after=0.2)
    server.client.xadd("noria:frames:other", {"boot": "x"})
    await gateway.enqueue(make_request("theirs", gateway="other"), card)
    await gateway.enqueue(make_request("ours"), card)
    theirs, ours = step(engine, max_requests=2).claimed
    server.client.delete("noria:frames:other")
    assert step(engine, row(theirs, 0, [1]), row(ours, 0, [1])).gone_gateways == []
    server.client.xadd("noria:frames:other", {"boot": "y"})  # it only slept
    step(engine)
    assert server.client.xlen("noria:frames:other") == 2
    server.client.delete("noria:frames:other")
    assert step(engine, row(theirs, 1, [2])).gone_gateways == []
    await asyncio.sleep(0.25)
    assert step(engine, row(theirs, 2, [3]), row(ours, 1, [2])).gone_gateways == ["other"]
    step(engine, row(theirs, 3, [], FinishReason.CANCELLED), row(ours, 2, [], FinishReason.STOP))
    assert [f.request_id for f in await reader.until(lambda fs: fs[-1:] and fs[-1].finish)] == ["ours"] * 3
    assert not [key for key in server.key_names() if "request:" in key or "progress:" in key]


async def test_the_bell_wakes_an_idle_engine(gateway, make_engine, make_request, step, card):
    engine = make_engine()
    started = time.monotonic()
    waiting = asyncio.create_task(asyncio.to_thread(engine.wait, 5.0))
    await asyncio.sleep(0.05)
    await gateway.enqueue(make_request("r"), card)
    await waiting
    assert time.monotonic() - started < 0.8
    assert len(step(engine, max_requests=1).claimed) == 1
    started = time.monotonic()
    await asyncio.to_thread(engine.wait, 0.1)
    assert 0.05 < time.monotonic() - started < 0.8


async def test_models_tell_known_serving_and_unknown_apart(
    server, gateway, make_engine, make_request, card, tokenizer_files
):
    assert await gateway.models() == []
    engine = make_engine()
    stats = EngineStats(running=3, kv_blocks_total=9)
    engine.exchange({}, stats, max_requests=0, max_blocks=0)
    await gateway.enqueue(make_request("r", service_class="flex"), card)
    fresh = GatewayBroker(server.url)
    (status,) = await fresh.models()
    assert (status.card, status.engines) == (card, {engine.engine_id: stats})
    assert status.queued == {"priority": 0, "default": 0, "flex": 1, "batch": 0}
    assert await fresh.tokenizer(MODEL) == tokenizer_files
    with pytest.raises(KeyError):
        await fresh.tokenizer("unknown")
    engine.close()
    await asyncio.sleep(1.1)
    (status,) = await fresh.models()
    assert (status.card, status.engines) == (card, {})
    assert 0 < server.client.pttl("noria:{demo/model}:card") <= 600_000
    server.client.zadd("noria:pools", {MODEL: 1})  # nobody has renewed it for long
    await asyncio.sleep(1.1)
    assert await fresh.models() == []
    await fresh.close()


async def test_a_paused_gateway_gets_its_stream_back(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    step(engine, row(claimed, 0, [1]))
    await reader.until(lambda frames: len(frames) == 1)
    server.client.delete(f"noria:frames:{gateway.boot_id}")
    step(engine, row(claimed, 1, [2]))  # kept until the stream is back
    async with asyncio.timeout(5):
        while not server.client.exists(f"noria:frames:{gateway.boot_id}"):
            await asyncio.sleep(0.02)
    step(engine, row(claimed, 2, [3], FinishReason.STOP))
    await reader.last_of("r")
    assert [f.token_ids for f in reader.all] == [[1], [2], [3]]


async def test_a_cancelled_reader_stops_whenever_it_is_cancelled(server):
    for i in range(60):
        gateway = GatewayBroker(server.url)
        reading = asyncio.create_task(anext(gateway.frames()))
        await asyncio.sleep(i * 0.0002)  # connecting, writing, waiting for the reply
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=0.5)
        assert done and reading.cancelled()
        await gateway.close()


async def test_streams_are_trimmed(server, gateway, make_engine, make_request, reader, step, row, card):
    engine = make_engine()
    await gateway.enqueue(make_request("r"), card)
    (claimed,) = step(engine, max_requests=1).claimed
    for seq in range(300):
        step(engine, row(claimed, seq, [seq]))
        await reader.until(lambda frames: len(frames) == seq + 1)  # noqa: B023
    assert [f.token_ids[0] for f in reader.all] == list(range(300))
    assert server.client.xlen(f"noria:frames:{gateway.boot_id}") < 100


async def test_what_cannot_be_read_hurts_nobody_else(
    server, gateway, make_engine, make_request, reader, step, row, card
):
    engine = make_engine()
    for request_id in ("foreign", "good"):
        await gateway.enqueue(make_request(request_id), card)
    server.client.hset("noria:{demo/model}:request:foreign", "body", b"\xc1")
    (good,) = step(engine, max_requests=2).claimed
    server.client.xadd(f"noria:frames:{gateway.boot_id}", {"f": b"\xc1"})
    step(engine, row(good, 0, [1], FinishReason.STOP))
    foreign, last = await reader.last_of("foreign", "good")
    assert (foreign.finish, last.finish) == (FinishReason.ERROR, FinishReason.STOP)
    assert not [key for key in server.key_names() if "request:" in key or "owned:" in key]
    server.client.set("noria:{other}:card", b"\xc1")
    server.client.zadd("noria:pools", {"other": 1e15})
    fresh = GatewayBroker(server.url)
    assert [status.card for status in await fresh.models()] == [card]
    await fresh.close()


async def test_many_frames_in_one_exchange_and_odd_bytes(gateway, make_engine, make_request, reader, step, card):
    engine = make_engine()
    ids = [f"req-{i}-ü{{x}}" for i in range(70)]
    for request_id in ids:
        await gateway.enqueue(make_request(request_id, tenant="a/b{}\x00ü"), card)
    claimed = step(engine, max_requests=100).claimed
    assert [c.request.id for c in claimed] == ids
    rows = [(c, TokenFrame(c.request.id, c.epoch, 0, [1 << 20], error="\x00é" * 300)) for c in claimed]
    assert step(engine, *rows).fenced == []
    assert [f.request_id for f in await reader.until(lambda frames: len(frames) == 70)] == ids


def test_an_unreachable_store_is_named_without_its_password(tmp_path):
    url = f"unix://:hunter2@{tmp_path}/none.sock"
    engine = EngineBroker(url, MODEL)
    with pytest.raises(RuntimeError):
        engine.exchange({}, None, max_requests=0, max_blocks=0)
    with pytest.raises(BrokerUnavailable) as error:
        asyncio.run(GatewayBroker(url).start())
    assert "none.sock" in str(error.value) and "hunter2" not in str(error.value)
    assert redact("redis://me:pw@h:1/0?password=x") == "redis://me:***@h:1/0?password=***"
    started = time.monotonic()
    engine.wait(0.2)
    assert time.monotonic() - started >= 0.19
    engine.close()


def test_the_scripts_know_the_classes_and_stay_in_their_pool():
    prelude = (connection.LUA / "prelude.lua").read_text()
    listed = re.search(r"local classes = {(.*)}", prelude)
    assert listed and tuple(re.findall(r"'(\w+)'", listed[1])) == CLASSES
    # Every key that a script names begins with its prefix, or was made from it.
    of_pool = {"pool", "request", "progress", "owned", "journal", "stats", "tenants", "line", "turns", "tags", "queue"}
    of_records = {"kind", "index", "entry", "chunks", "book", "expiry", "sizes", "bytes", "batch"}
    for path in Path(connection.LUA).glob("*.lua"):
        text = path.read_text()
        records = path.name.startswith(("record", "batch_line"))
        alone = path.stem in ("pools", "log", "watch", "batch_lease")
        assert alone or "noria:" not in re.sub(r"--.*", "", text)
        for first in re.findall(r"redis\.call\('[A-Z]+', ([a-zA-Z_]+)", text):
            made = {"KEYS"} if alone else of_records if records else of_pool
            assert first in made, (path.name, first)
