"""How frames lie in the store: packed for a gateway's stream, length-prefixed in a request's progress.

Knows the layout of bytes and the final frames of requests that the store itself ended; knows no client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from noria.engine.wire import keys
from noria.engine.wire.messages import FinishReason, TokenFrame, Usage, decode_frame, encode

STREAM_LENGTH = 10_000
"""Entries, about one per iteration, that a gateway's stream holds at most (roughly)."""


def pack(frames: Sequence[bytes]) -> bytes:
    """Encoded frames as one msgpack array, without encoding them again."""
    count = len(frames)
    header = bytes([0x90 | count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return header + b"".join(frames)


def publication(gateway: str, frames: Sequence[bytes]) -> tuple[Any, ...]:
    """The command that sends frames to a gateway; its reply is None where the gateway's stream is gone."""
    key = keys.frames(gateway)
    return ("XADD", key, "NOMKSTREAM", "MAXLEN", "~", STREAM_LENGTH, "*", "f", pack(frames))


def as_text(frame: bytes) -> msgspec.Raw:
    """An encoded frame as msgpack text: the store's own msgpack decoder knows no binary type."""
    return msgspec.Raw(b"\xdb" + len(frame).to_bytes(4, "big") + frame)


def parse_progress(blob: bytes) -> list[TokenFrame]:
    """The frames of a request's progress, in order. Each lies behind its length in 4 bytes, big-endian."""
    frames, at = [], 0
    while at < len(blob):
        start = at + 4
        at = start + int.from_bytes(blob[at:start], "big")
        frames.append(decode_frame(memoryview(blob)[start:at]))
    return frames


def final_frame(ending: Sequence[Any], finish: FinishReason, error: str | None = None) -> tuple[str, TokenFrame]:
    """(gateway, last frame) of a request that a script ended: [id, gateway, epoch, seq, prompt tokens]."""
    request_id, gateway, epoch, seq, prompt = ending
    frame = TokenFrame(
        request_id=request_id.decode(),
        epoch=epoch,
        seq=seq,
        token_ids=[],
        finish=finish,
        usage=Usage(prompt, seq),
        error=error,
    )
    return gateway.decode(), frame


def final_publications(cancelled: Sequence[Any], dead: Sequence[Any], expired: Sequence[Any]) -> dict[str, list[bytes]]:
    """Encoded last frames by gateway, of requests that a script ended in these ways."""
    frames_by_gateway: dict[str, list[bytes]] = {}
    for endings, finish, error in (
        (cancelled, FinishReason.CANCELLED, None),
        (dead, FinishReason.ERROR, POISON),
        (expired, FinishReason.EXPIRED, None),
    ):
        for ending in endings:
            gateway, frame = final_frame(ending, finish, error)
            frames_by_gateway.setdefault(gateway, []).append(encode(frame))
    return frames_by_gateway


POISON = "the engines that ran this request died; it is not tried again"
