"""What a pool's keys hold, read from a store and as the reference has it: two mappings that have to be the same.

Knows the layout of the keys (docs/broker.md) and nothing of how they came about.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import redis

from noria.engine.wire.messages import CLASSES, decode_frame
from tests.engine.wire.reference.claiming import Standing
from tests.engine.wire.reference.pool import Pool
from tests.engine.wire.reference.requests import Request

CLOCK = "clock"
"""The time of these tests, beside the pool's own keys."""

_ELSEWHERE = (CLOCK, "card", "tokenizer", "last_look")

Contents = dict[str, Any]


def expected(pool: Pool) -> Contents:
    """What has to be in the store."""
    contents: dict[str, dict[str, Any]] = defaultdict(dict)
    for request in pool.requests.values():
        contents["request:" + request.id] = _fields(request)
        _wait(contents, request) if request.waits else contents["owned:" + request.engine].update(
            {request.id: request.state}
        )
    recorded = {"progress:" + r.id: b"".join(r.frames) for r in pool.requests.values() if r.frames}
    for (service_class, tenant), start in pool.turns.start.items():
        contents["turns:" + service_class][tenant] = start
    contents["finish_tags"] = {f"{c}/{t}": tag for (c, t), tag in pool.turns.served.items()} | {
        f"*/{c}": tag for c, tag in pool.turns.class_served.items()
    }
    times: dict[str, float] = {**pool.turns.time, "*": pool.turns.class_time, "arrivals": pool.arrivals}
    times |= {f"passed/{c}": n for c, n in pool.turns.passed.items()}
    contents["virtual_time"] = _without_zeros(times)
    contents["engines"] = {engine: lease.expires for engine, lease in pool.leases.items()}
    contents["engine_stats"] = {engine: lease.stats for engine, lease in pool.leases.items() if lease.stats}
    contents["lives"] = {engine: lease.life for engine, lease in pool.leases.items()}
    contents["rooms"] = {engine: _room(lease.standing) for engine, lease in pool.leases.items()}
    contents["trials"] = {engine: lease.trial for engine, lease in pool.leases.items() if lease.trial}
    contents["drain"] = _without_zeros(
        {"at": pool.drain.at, "tokens": pool.drain.tokens, "rate": rounded(pool.drain.rate or 0.0)}
    )
    lists = {"cancel:" + engine: lease.to_cancel for engine, lease in pool.leases.items()}
    rest = {"bell": pool.bell, "dead": pool.dead, "endings": set(pool.endings), "ledger": pool.ledger}
    whole: Contents = {**contents, **recorded, **lists, **rest}
    return {key: value for key, value in whole.items() if value}


def _fields(r: Request) -> dict[str, str | bytes]:
    """A request's record, what is read of it only while it waits left out where it runs."""
    fields: dict[str, Any] = {
        "body": r.body, "size": len(r.body), "class": r.service_class, "tenant": r.tenant, "gateway": r.gateway,
        "cost": r.cost, "block_size": r.block_size, "prompt": r.prompt, "tokens": r.tokens, "weight": r.weight,
        "deadline": "" if r.deadline is None else r.deadline, "logged": int(r.logged), "engine": r.engine,
        "epoch": r.epoch, "attempts": len(r.lives), "arrival": r.arrival, "since": r.since,
        "place": r.priority * 2**32 + r.arrival,
    }  # fmt: skip
    optional = {
        "engines": " ".join(r.engines),
        "suspect": r.suspect,
        "cancel": r.cancelled,
        "skipped": r.misfit_since,
        "why": r.why,
    }
    fields |= {name: value for name, value in optional.items() if value}
    if r.account:
        fields |= {"account": r.account, "billed": r.billed, "accepted": r.accepted}
        fields |= {"claimed": r.claimed} if r.claimed else {}
    if r.counted is not None:
        fields["counted"] = r.counted
    if r.lives:
        fields["lives"] = f" {' '.join(r.lives)} "
    if r.waits:
        fields |= {"seq": r.seq} | ({"done": 1} if r.done else {})
    return {name: _text(value) for name, value in fields.items()}


def _room(standing: Standing | None) -> str:
    return f"{standing.held} {standing.slots} {standing.blocks}" if standing else ""


def _text(value: Any) -> str | bytes:
    return value if isinstance(value, bytes) else str(int(value) if isinstance(value, bool) else value)


def _wait(contents: dict[str, dict[str, Any]], r: Request) -> None:
    if r.suspect:
        contents["suspects"][r.id] = CLASSES.index(r.service_class) * 2**40 + r.arrival
    else:
        contents["queue:" + r.service_class][r.id] = r.arrival
        contents[f"line:{r.service_class}/{r.tenant}"][r.id] = r.priority * 2**32 + r.arrival
    if r.deadline is not None:
        contents["deadlines"][r.id] = r.deadline
    counts = {r.service_class: 1, "bytes": len(r.body), "tokens": r.tokens}
    of_tenant = {f"{name}:{r.tenant}": counts.get(name, 1) for name in ("depth", "bytes", "tokens")}
    for key, numbers in (("stats", counts), ("tenants", of_tenant)):
        for name, number in numbers.items():
            contents[key][name] = contents[key].get(name, 0) + number


def read(client: redis.Redis, prefix: str) -> Contents:
    """What is in the store, what lies in an engine's journal put where it will be: into the progress of requests."""
    names = [key.decode().removeprefix(prefix) for key in client.keys(prefix + "*")]
    names = [name for name in names if name not in _ELSEWHERE]
    pipeline = client.pipeline(transaction=False)
    for name in names:
        _ask(pipeline, prefix + name, _kind(name))
    contents: Contents = {name: _value(name, reply) for name, reply in zip(names, pipeline.execute(), strict=True)}
    for name in names:
        if name.startswith("journal:"):
            _fold(contents, name.removeprefix("journal:"), contents.pop(name))
    for name in ("stats", "virtual_time", "drain"):  # nothing counted, or no field: the same
        contents[name] = _without_zeros(contents.get(name, {}))
    if "rate" in contents["drain"]:
        contents["drain"]["rate"] = rounded(contents["drain"]["rate"])
    for request_id in (i for name in contents if name.startswith("owned:") for i in contents[name]):
        for field in ("seq", "done"):  # as they were when it was claimed
            contents["request:" + request_id].pop(field, None)
    return {key: value for key, value in contents.items() if value}


_SETS = {"engines", "suspects", "deadlines", "queue", "line", "turns"}
_LISTS = {"cancel", "journal"}
_HASHES = {"finish_tags", "virtual_time", "drain", "stats", "tenants"}  # of numbers


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _ask(pipeline: Any, key: str, kind: str) -> None:
    if kind in _SETS:
        pipeline.zrange(key, 0, -1, withscores=True)
    elif kind in _LISTS:
        pipeline.lrange(key, 0, -1)
    elif kind in ("dead", "ledger"):
        pipeline.xrange(key)
    elif kind == "bell":
        pipeline.llen(key)
    elif kind == "progress":
        pipeline.get(key)
    else:
        pipeline.hgetall(key)


def _value(name: str, reply: Any) -> Any:
    kind = _kind(name)
    if kind in _SETS:
        return {member.decode(): score for member, score in reply}
    if kind == "dead":
        return [tuple(_dead_letter(fields)) for _, fields in reply]
    if kind == "ledger":
        return [{name.decode(): text.decode() for name, text in fields.items()} for _, fields in reply]
    if kind == "bell":
        return bool(reply)
    if kind == "cancel":
        return [request_id.decode() for request_id in reply]
    if kind in _HASHES:
        return {field.decode(): float(number) for field, number in reply.items()}
    if kind == "endings":
        return {field.decode() for field in reply}
    if kind == "request":
        return {f.decode(): v if f == b"body" else v.decode() for f, v in reply.items()}
    if kind in ("owned", "lives", "rooms", "trials"):
        return {field.decode(): text.decode() for field, text in reply.items()}
    return {f.decode(): v for f, v in reply.items()} if isinstance(reply, dict) else reply


def _dead_letter(fields: dict[bytes, bytes]) -> tuple[str, int, str, str]:
    return (
        fields[b"id"].decode(), int(fields[b"attempts"]), fields[b"engines"].decode(), fields[b"error"].decode()
    )  # fmt: skip


def _fold(contents: Contents, engine: str, journal: list[bytes]) -> None:
    held = contents.get("owned:" + engine, {})
    for encoded in (one for entry in journal for one in split(entry)):
        frame = decode_frame(encoded[4:])
        if held.get(frame.request_id) == f"{frame.epoch} {frame.seq}":
            done = " done" * (frame.finish is not None)
            held[frame.request_id] = f"{frame.epoch} {frame.seq + len(frame.token_ids)}{done}"
            key = "progress:" + frame.request_id
            contents[key] = contents.get(key, b"") + encoded


def split(frames: bytes) -> list[bytes]:
    """Frames end to end, each behind its length in 4 bytes: each with its length."""
    pieces, at = [], 0
    while at < len(frames):
        size = 4 + int.from_bytes(frames[at : at + 4], "big")
        pieces.append(frames[at : at + size])
        at += size
    return pieces


def rounded(rate: float) -> float:
    """A drain rate without its last digits: exponentials differ there."""
    return float(f"{rate:.6g}")


def _without_zeros(numbers: dict[str, float]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number}


def differences(expected: Contents, found: Contents) -> list[str]:
    """In words, one for each key that differs."""
    return [
        f"{key}: {expected.get(key)!r} expected, {found.get(key)!r} in the store"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]
