"""How much memory there is, and how much of it the KV cache gets. Bytes everywhere.

Knows the machine; not models or blocks.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

# When the operator gives no size: a share of what is free once the weights are in, up to a limit, since what a
# pool has once used is kept, and on a CPU bandwidth ends long before gigabytes of KV are read in an iteration.
KV_SHARE = 0.25
KV_LIMIT = 2 * 2**30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Room:
    """Where a KV cache is put, and what it takes there where the operator gives no size."""

    free: int
    share: float = KV_SHARE
    limit: int = KV_LIMIT


class MemoryTooSmall(Exception):
    """What was asked for does not fit; the message has the numbers."""


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2 GB", "1g" or "123456". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size: write a number of bytes, or one with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2]])


def show_size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"


def available() -> int:
    """Memory that this process can still take: the system's, or less where its control group allows less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no version 2 control group here
    return max(free, 0)


def give_back() -> None:
    """Return to the system what was freed and is kept for the next allocation, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def kv_bytes(setting: str, *, weight_bytes: int, wanted: int, least: int, room: Room | None = None) -> int:
    """Bytes for the KV cache under `setting` ("auto" or a size), in `room` or the system's memory.

    `wanted` is what a full batch of longest requests would use, `least` the smallest pool worth starting with. Raises
    MemoryTooSmall, with the numbers, before anything is loaded.
    """
    room = room or Room(available())
    free = room.free - weight_bytes
    if free < least:
        raise MemoryTooSmall(
            f"too little memory: the weights take {show_size(weight_bytes)}, the smallest KV cache "
            f"{show_size(least)}, and {show_size(room.free)} are free"
        )
    if setting.strip().lower() == "auto":
        return max(least, min(wanted, room.limit, int(free * room.share)))
    size = parse_size(setting)
    if size < least:
        raise MemoryTooSmall(f"--kv-memory {setting} is too small: one block takes {show_size(least)}")
    if size > free:
        raise MemoryTooSmall(
            f"too little memory: --kv-memory {setting} and {show_size(weight_bytes)} of weights, and "
            f"{show_size(room.free)} are free"
        )
    return size
