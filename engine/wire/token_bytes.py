"""What each token id contributes to the text, as bytes: byte-level and SentencePiece vocabularies.

This file knows the decoder shapes of the `tokenizers` JSON, and nothing of encoding, templates or requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


class UnsupportedTokenizer(ValueError):
    """The tokenizer's files describe a kind that cannot be mapped to bytes token by token."""


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte of GPT-2's printable alphabet: printable Latin-1 stands for itself, the rest is shifted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {256 + shift: byte for shift, byte in enumerate(rest)}


class _Alphabet(dict[int, int]):
    def __missing__(self, code_point: int) -> int:
        raise ValueError(code_point)  # str.translate would swallow a LookupError


_ALPHABET = _Alphabet(_byte_alphabet())
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes | None:
    """Bytes of a token spelled in GPT-2's byte alphabet; None if a character is not of that alphabet."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except ValueError:
        return None


def bytes_by_id(spec: Mapping[str, Any], tokens: Mapping[int, str]) -> list[bytes]:
    """Bytes of every id from 0 to the highest one (holes give b""), following the spec's decoder.

    `spec` is the parsed `tokenizers` JSON, `tokens` its vocabulary by id, added tokens included. Raises
    UnsupportedTokenizer for a decoder of another kind (WordPiece, CTC, none).
    """
    to_bytes = _decoder(spec.get("decoder"))
    table = [b""] * (max(tokens, default=-1) + 1)
    for token_id, token in tokens.items():
        table[token_id] = to_bytes(token)
    return table


def _decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _from_byte_level
    spaces = [_replacement(step) for step in steps if step["type"] in ("Metaspace", "Replace")]
    if not spaces or not kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise UnsupportedTokenizer(f"tokenizer decoder {sorted(kinds) or 'none'} is not supported")
    byte_fallback = "ByteFallback" in kinds

    def from_sentencepiece(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in spaces:
            token = token.replace(old, new)
        return token.encode()

    return from_sentencepiece


def _from_byte_level(token: str) -> bytes:
    # A token with any character outside the alphabet is literal text (an added token), as in the library.
    spelled = byte_level_bytes(token)
    return token.encode() if spelled is None else spelled


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    pattern = step["pattern"]
    if "String" not in pattern:
        raise UnsupportedTokenizer("tokenizer decoder with a regular expression is not supported")
    return pattern["String"], step["content"]
