"""What `noria doctor` asks a store: does it answer, is it new enough, does it keep what it accepted, what time has it.

Knows what the broker needs of a store; changes nothing in it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from noria.doctor import Finding, fail, ok, warn
from noria.engine.wire.connection import BrokerUnavailable, Store, StoreFault, redact
from noria.engine.wire.nodes import parse_nodes
from noria.engine.wire.slots import Command

OLDEST = (7, 0)
MOST_SKEW = 1.0  # seconds; deadlines are compared across machines
SLOW_TRIP = 0.005  # seconds; an engine makes one round trip per iteration
NEARLY_FULL = 0.8


def check_store(url: str) -> Iterator[Finding]:
    """Everything about the store at `url`."""
    try:
        store = Store(url)
    except ValueError as error:
        yield fail("store", f"{redact(url)}: {error}", "give an address like redis://host:6379/0 in NORIA_REDIS_URL")
        return
    try:
        store.run(("PING",))
    except (BrokerUnavailable, StoreFault) as error:
        yield _unreachable(url, str(error))
        return
    try:
        yield ok("store", f"{redact(url)} answers")
        info = _info(store)
        yield from _kind(info, url)
        yield from _settings(store, info)
        yield from _times(store)
    except (BrokerUnavailable, StoreFault) as error:
        yield fail("store", f"it stopped answering: {error}", "look at its log")
    finally:
        store.close()


def _unreachable(url: str, error: str) -> Finding:
    reason = error.removeprefix(f"{redact(url)}: ")
    lowered = reason.lower()
    if "noauth" in lowered or "authentication" in lowered or "wrongpass" in lowered or "password" in lowered:
        cure = "give its password: NORIA_REDIS_PASSWORD_FILE, or redis://user:password@host in NORIA_REDIS_URL"
        return fail("store", f"{redact(url)} wants another password: {reason}", cure)
    cure = "start it (redis-server), or give the right address in NORIA_REDIS_URL"
    return fail("store", f"{redact(url)} cannot be reached: {reason}", cure)


def _ask(store: Store, command: Command) -> Any:
    """The reply, or None where the store does not let us ask."""
    try:
        return store.run(command)[0]
    except (BrokerUnavailable, StoreFault) as error:
        if re.search(r"NOPERM|unknown command|permission", str(error)):
            return None
        raise


def _info(store: Store) -> dict[str, str]:
    lines = (_ask(store, ("INFO",)) or b"").decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _kind(info: dict[str, str], url: str) -> Iterator[Finding]:
    name = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    shown = info.get("valkey_version") or info.get("redis_version", "?")
    version = tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", ""))[:2])
    if version and version < OLDEST:
        yield fail(
            "store version", f"{name} {shown} lacks commands that the broker uses", "upgrade to Redis 7 or Valkey"
        )
    else:
        yield ok("store version", f"{name} {shown}")
    if info.get("role") == "slave":
        yield fail("store role", "this is a replica: it refuses writes", "give the address of the primary")
    if info.get("cluster_enabled") == "1" and parse_nodes(url) is None:
        cure = "give the cluster's address: redis+cluster://host:port,host:port in NORIA_REDIS_URL"
        yield fail("store role", "this is one node of a cluster: it refuses the others' keys", cure)
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield fail("store file", "the append-only file could not be written", "free space on the store's disk")


def _settings(store: Store, info: dict[str, str]) -> Iterator[Finding]:
    wanted = ("maxmemory-policy", "maxmemory", "appendonly", "appendfsync")
    replies = [_ask(store, ("CONFIG", "GET", name)) for name in wanted]
    if any(reply is None for reply in replies):
        yield warn(
            "store settings",
            "the store does not tell its settings",
            "see to it that they are: maxmemory-policy noeviction, appendonly yes, a maxmemory",
        )
        return
    policy, limit, appendonly, appendfsync = (reply[1].decode() if reply else "" for reply in replies)
    if policy != "noeviction":
        yield fail(
            "store eviction",
            f"maxmemory-policy is {policy}: a full store drops requests that were accepted",
            "CONFIG SET maxmemory-policy noeviction, and the same in its configuration",
        )
    if appendonly != "yes":
        yield fail(
            "store durability",
            "appendonly is off: what waits and what tenants keep is lost when the store restarts",
            "CONFIG SET appendonly yes, and the same in its configuration",
        )
    elif appendfsync == "no":
        yield warn("store durability", "appendfsync is no: a crash may lose half a minute", "set appendfsync everysec")
    else:
        yield ok("store durability", f"append-only file, synchronised {appendfsync}; {policy}")
    yield _memory(int(limit or 0), int(info.get("used_memory", 0)))


def _memory(limit: int, used: int) -> Finding:
    if not limit:
        return warn(
            "store memory",
            "maxmemory is 0: a long queue takes all of the machine's memory",
            "set maxmemory to twice what you expect (docs/broker.md); beyond it clients get 503",
        )
    share = f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB"
    if used > NEARLY_FULL * limit:
        return warn("store memory", f"{share} are used", "raise maxmemory, or see what is kept: noria queue")
    return ok("store memory", share)


def _times(store: Store) -> Iterator[Finding]:
    trips: list[float] = []
    skews: list[float] = []
    for _ in range(9):
        before = time.time()
        seconds, micros = store.run(("TIME",))[0]
        trips.append(time.time() - before)
        skews.append(int(seconds) + int(micros) / 1e6 - before - trips[-1] / 2)
    skew, trip = median(skews), median(trips)
    if abs(skew) > MOST_SKEW:
        yield fail(
            "clock",
            f"the store's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's: deadlines "
            "and leases go wrong",
            "keep the time on both machines: timedatectl set-ntp true, or chrony",
        )
    else:
        yield ok("clock", f"{1000 * abs(skew):.0f} ms from the store's")
    if trip > SLOW_TRIP:
        yield warn(
            "store distance",
            f"a round trip takes {1000 * trip:.1f} ms, and every iteration makes one",
            "run engines near their store",
        )
    else:
        yield ok("store distance", f"a round trip takes {1000 * trip:.2f} ms")
