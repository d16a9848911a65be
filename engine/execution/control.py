"""The control channel's messages: integers and settings to the ranks, chosen tokens back. No tensor travels here.

Frozen records in msgpack over the standard library's authenticated connections. Knows no policy and no model.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from noria.engine.execution.step import Mask, RowOutput, StepInput


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first word of a rank: how many KV blocks it has room for, and where it is, for people."""

    rank: int
    num_blocks: int
    place: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load, and make so many KV blocks: as many as the rank with the least room has."""

    num_blocks: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Loaded."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot go on. `is_final`: nor could one in its place."""

    message: str
    is_final: bool = False


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The data channel to some other rank broke."""

    message: str


class Step(msgspec.Struct, frozen=True, tag="step"):
    number: int
    step: StepInput


class Masks(msgspec.Struct, frozen=True, tag="masks"):
    """Masks that a step named by their numbers: (positions, their words), or why there is none."""

    masks: dict[int, tuple[int, bytes] | str]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """A step's results from the rank that samples; or from any rank why it could not compute its share."""

    number: int
    outputs: list[RowOutput]
    error: str | None = None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for a sign of life."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """A sign of life."""


ToRank = Start | Step | Masks | Ping
FromRank = Hello | Ready | Failed | Broken | Answer | Pong


class LineClosed(Exception):
    """There is nobody at the other end any more."""


class Line:
    """One end of a rank's connection. Any thread may send, one receives. `sent` counts messages by tag."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sent: Counter[str] = Counter()
        self._lock = threading.Lock()

    def send(self, message: ToRank | FromRank) -> None:
        """Raises LineClosed."""
        self.send_encoded(message.__struct_config__.tag, encode(message, _no_masks))

    def send_encoded(self, tag: Any, message: bytes) -> None:
        """What `encode` made, which several ranks may be sent. Raises LineClosed."""
        with self._lock:
            self._write(tag, message)

    def offer(self, message: ToRank) -> None:
        """Send a small message, unless that would have to wait: for who is sending, or for the other end to read.
        Raises LineClosed."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._is_writable():
                self._write(message.__struct_config__.tag, encode(message, _no_masks))
        finally:
            self._lock.release()

    def _write(self, tag: Any, message: bytes) -> None:
        try:
            self.sent[str(tag)] += 1
            self.connection.send_bytes(message)
        except (OSError, ValueError) as error:
            raise LineClosed(str(error)) from error

    def _is_writable(self) -> bool:
        """With room for far more than a small message: so the system has it."""
        poll = select.poll()
        try:
            poll.register(self.connection, select.POLLOUT)
        except (OSError, ValueError) as error:
            raise LineClosed(str(error)) from error
        return bool(poll.poll(0))

    def receive(self) -> bytes:
        """The next message; blocks. Raises LineClosed."""
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise LineClosed(str(error)) from error

    def close(self) -> None:
        """Nothing more is sent either way. The descriptor stays with whoever is receiving, who finds out."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def encode(message: ToRank | FromRank, number_of: Callable[[Mask], int]) -> bytes:
    """Masks are encoded as their numbers: they are sent when they are known."""
    return msgspec.msgpack.encode(message, enc_hook=number_of)


def _no_masks(value: object) -> int:
    raise TypeError(f"{type(value)} cannot be sent")


decode_from_rank: Callable[[bytes], FromRank] = msgspec.msgpack.Decoder(FromRank).decode


def decoder_at_rank(mask_of: Callable[[int], Mask]) -> Callable[[bytes], ToRank]:
    """Decodes what rank 0 sends; `mask_of` gives the mask that has a number."""

    def hook(kind: type, value: Any) -> Any:
        return mask_of(value)

    decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=hook)
    return decoder.decode
