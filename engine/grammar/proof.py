"""What is asked of the process that tries grammars out, and its answer: messages and their framing on a pipe.

Knows no grammar's meaning.
"""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from noria.engine.wire.messages import Grammar, TokenizerFiles


class Setup(msgspec.Struct, frozen=True):
    """The first message: for which model grammars are compiled, and the limits of each in time and memory."""

    files: TokenizerFiles
    vocab_size: int  # of the model: the tokenizer's may be smaller
    stop_token_ids: tuple[int, ...]
    seconds: float
    num_bytes: int


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a `Grammar`: `refusal` says what is wrong with it, None that it is good. The answer to `Setup` has
    xgrammar's tables of the tokenizer, as `binding.read_tables` reads them, or says why there can be none."""

    refusal: str | None = None
    tables: list[str] = []


_encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_grammar = msgspec.msgpack.Decoder(Grammar).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def send(pipe: BinaryIO, message: msgspec.Struct) -> None:
    """Write one message. Raises OSError when nobody reads any more."""
    packed = _encode(message)
    pipe.write(len(packed).to_bytes(4, "big") + packed)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes:
    """Read one message. Raises EOFError when the other side is gone."""
    head = pipe.read(4)
    packed = pipe.read(int.from_bytes(head, "big")) if len(head) == 4 else b""
    if not packed:
        raise EOFError
    return packed
