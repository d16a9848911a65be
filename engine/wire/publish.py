"""How frames lie in the store: packed for a gateway's stream or a request's log, behind their lengths in progress.

Knows the layout of bytes and the final frames of requests that the store itself ended; knows no client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from noria.engine.wire import keys
from noria.engine.wire.connection import LOG
from noria.engine.wire.messages import FinishReason, TokenFrame, Usage, decode_frame, encode
from noria.engine.wire.slots import Command

STREAM_LENGTH = 10_000
"""Entries, about one per iteration, that a gateway's stream holds at most (roughly)."""

LOG_KEPT = 600.0
"""Seconds that a request's log outlives the request's end."""

POISON = "the engines that ran this request died; it is not tried again"


@dataclass(slots=True)
class Row:
    """One frame on its way: encoded once, sent several times (progress, stream, log)."""

    frame: TokenFrame
    encoded: bytes
    length: bytes  # of `encoded`, in 4 bytes, big-endian


def to_row(frame: TokenFrame) -> Row:
    """The frame, encoded."""
    encoded = encode(frame)
    return Row(frame, encoded, len(encoded).to_bytes(4, "big"))


def pack(frames: Sequence[bytes]) -> bytes:
    """Encoded frames as one msgpack array, without encoding them again."""
    count = len(frames)
    header = bytes([0x90 | count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return header + b"".join(frames)


def publication(key: str, rows: Sequence[Row]) -> Command:
    """The command that sends frames to a gateway's stream or a request's log (`keys.frames`, `keys.log`); its reply
    is None where that stream is gone."""
    packed = pack([r.encoded for r in rows])
    if keys.is_log(key):
        return LOG(key, packed, int(LOG_KEPT * 1000) if any(r.frame.finish for r in rows) else "")
    return ("XADD", key, "NOMKSTREAM", "MAXLEN", "~", STREAM_LENGTH, "*", "f", packed)


def parse_progress(blob: bytes) -> list[TokenFrame]:
    """The frames of a request's progress, in order. Each lies behind its length in 4 bytes, big-endian."""
    frames, at = [], 0
    while at < len(blob):
        start = at + 4
        at = start + int.from_bytes(blob[at:start], "big")
        frames.append(decode_frame(memoryview(blob)[start:at]))
    return frames


def address(
    rows_by_key: dict[str, list[Row]], rows: Sequence[Row], *, request_id: str, gateway: str, logged: bool
) -> None:
    """Add one request's frames under the key of each stream that they go to."""
    rows_by_key.setdefault(keys.frames(gateway), []).extend(rows)
    if logged:
        rows_by_key.setdefault(keys.log(request_id), []).extend(rows)


def last_frame(ending: Sequence[Any], finish: FinishReason, error: str | None = None) -> TokenFrame:
    """The last frame of a request that a script ended: [id, gateway, epoch, seq, prompt tokens, 1 if logged, …]."""
    request_id, _, epoch, seq, prompt = ending[:5]
    return TokenFrame(
        request_id=request_id.decode(),
        epoch=epoch,
        seq=seq,
        token_ids=[],
        finish=finish,
        usage=Usage(prompt, seq),
        error=error,
    )


_REASONS: dict[bytes, tuple[FinishReason, str | None]] = {
    b"cancelled": (FinishReason.CANCELLED, None),
    b"dead": (FinishReason.ERROR, POISON),
    b"expired": (FinishReason.EXPIRED, None),
    b"broken": (FinishReason.ERROR, "the record of this request cannot be used"),
}


def final_publications(endings: Sequence[Sequence[Any]]) -> dict[str, list[Row]]:
    """Frames by the key of their stream, of requests that a script ended: what was recorded, since its engine may have
    died before it was published, and the last frame. The last fields of an ending are its reason and the progress."""
    rows_by_key: dict[str, list[Row]] = {}
    for ending in endings:
        last = last_frame(ending, *_REASONS[ending[6]])
        try:
            frames = [msgspec.structs.replace(frame, epoch=last.epoch) for frame in parse_progress(ending[7])]
        except msgspec.DecodeError:  # written by another version
            frames = []
        if not (frames and frames[-1].finish):
            frames.append(last)
        gateway, logged = ending[1].decode(), bool(ending[5])
        address(rows_by_key, list(map(to_row, frames)), request_id=last.request_id, gateway=gateway, logged=logged)
    return rows_by_key


def published(pool: str, endings: Sequence[Sequence[Any]]) -> list[Command]:
    """What follows the publication of endings, in the same pipeline: no reaper needs to publish them again."""
    return [("HDEL", pool + "endings", *(ending[0] for ending in endings))] if endings else []
