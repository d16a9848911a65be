"""tiktoken as the fast encoder of a byte-level BPE tokenizer, only where it gives the same ids as `tokenizers`.

This file knows the shape of a `tokenizers` JSON; it knows no control tokens, templates or requests.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tiktoken
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from noria.engine.wire.encoder_samples import sample_texts
from noria.engine.wire.token_bytes import byte_level_bytes

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are cut out first and the rest sees only the pieces: a run of white space before a digit stands at the end of
# its piece, so the look-ahead asks for a non-space that is no digit, and no space is taken along with a digit.
_DIGITS_THEN_GPT2 = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

# The part of the regex language that means the same to both engines (Oniguruma there, fancy-regex here).
_CLASS = r"\\[pP]\{[A-Za-z]+\}|\\[sSd]"
_ITEM = rf"{_CLASS}|\\[rnt]|\\[^\w\s]"
_SHARED = re.compile(
    rf"(?:{_ITEM}|\[\^?(?:{_ITEM}|[^\[\]\\&~])+\]|\(\?(?:i:|:|!|=)|[()|]|[?*+]|\{{\d+(?:,\d*)?\}}|[^\[\]\\(){{}}^$.?*+|])*"
)
_LONG_RUN = 100_000  # characters; fancy-regex gives up at about a million steps of back-tracking over one run
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{_LONG_RUN}}}")


class TiktokenEncoder:
    """Encodes plain text with tiktoken; None where only `tokenizers` is known to be right."""

    def __init__(self, encoding: tiktoken.Encoding, vocab_size: int, disputed: str, normalize: _Normalizer) -> None:
        self._encoding = encoding
        self._vocab_size = vocab_size
        self._disputed = re.compile(f"[{re.escape(disputed)}]") if disputed else None
        self._normalizer = normalize

    def encode(self, text: str) -> list[int] | None:
        """Ids of `text` (no added tokens looked for), or None: ask the library instead."""
        if len(text) >= _LONG_RUN and _LONG_SPACE.search(text):
            return None
        if not text.isascii():
            if self._normalizer is not None:
                text = self._normalizer.normalize_str(text)
            if self._disputed is not None and self._disputed.search(text):
                return None
        try:
            ids = self._encoding.encode_ordinary(text)
        except Exception:
            return None
        except BaseException as panic:  # a Rust panic is no Exception
            if type(panic).__name__ != "PanicException":
                raise
            return None
        # Bytes that the vocabulary lacks have ids past its end; the library drops them in ways of its own.
        return ids if max(ids, default=0) < self._vocab_size else None


_Normalizer = normalizers.Normalizer | None


def tiktoken_encoder(spec: Mapping[str, Any], oracle: tokenizers.Tokenizer) -> TiktokenEncoder | None:
    """The encoder for `spec` (parsed `tokenizers` JSON), or None where equality with `oracle` is not established.

    `oracle` must encode special tokens as text. Three things are asked: the merge rules are what tiktoken's ranks
    imply (`_ranks`), the pre-tokenizer is one of the known shapes and both regex engines see the same character
    classes, and the sample texts come out equal.
    """
    pattern = _pattern(spec.get("pre_tokenizer"))
    normalizer = spec.get("normalizer")
    if pattern is None or (normalizer is not None and normalizer["type"] not in ("NFC", "NFD", "NFKC", "NFKD")):
        return None
    ranks = _ranks(spec)
    if ranks is None:
        return None
    disputed = [_disputed(name) for name in sorted(set(re.findall(_CLASS, pattern)))]
    if '"Digits"' in json.dumps(spec["pre_tokenizer"]):
        disputed.append(_disputed_digits())
    if any(characters is None for characters in disputed):
        return None
    vocab_size = oracle.get_vocab_size(with_added_tokens=True)
    vocab_size = max(vocab_size, max(ranks.values()) + 1)
    for byte in range(256):
        ranks.setdefault(bytes([byte]), vocab_size + byte)
    encoding = tiktoken.Encoding("noria", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    encoder = TiktokenEncoder(
        encoding, vocab_size, "".join(filter(None, disputed)), oracle.normalizer if normalizer else None
    )
    return encoder if _agree(encoder, oracle) else None


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """One regex whose matches are the pieces that `pre_tokenizer` makes; None for an unknown shape."""
    if pre_tokenizer is None:
        return None
    cuts: list[str] = []
    steps: Sequence[Mapping[str, Any]] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    for step in steps[:-1]:
        if step["type"] == "Digits" and step.get("individual_digits"):
            cuts.append(r"\p{N}")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
            cuts.append(step["pattern"].get("Regex", ""))
        else:
            return None
    byte_level = steps[-1] if steps else {}
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space", True):
        return None
    if byte_level.get("use_regex", True):
        cuts.append(_GPT2)
    if cuts == [r"\p{N}", _GPT2]:
        return _DIGITS_THEN_GPT2
    return cuts[0] if len(cuts) == 1 and cuts[0] and _SHARED.fullmatch(cuts[0]) else None


def _ranks(spec: Mapping[str, Any]) -> dict[bytes, int] | None:
    """Token bytes -> id for tiktoken, or None where its rule of merging could differ from the listed merges.

    tiktoken merges any neighbours whose joined bytes are a token, lowest id first; the library merges listed pairs
    only, first listed first. The two agree if (1) the listed order is the order of the ids and (2) every token, its
    bytes encoded alone, gives itself: a pair of neighbours met anywhere has gone through the same merges as when its
    bytes stand alone, so it is the listed pair of that token. A token that fails (2) can never come out of merging,
    and is left out. With `ignore_merges` it can still come out as a whole piece, so it stays, which is harmless
    unless its own encoding ends in exactly two parts that tiktoken would join.
    """
    model = spec["model"]
    plain = not any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    if model.get("type") != "BPE" or not plain:
        return None
    vocab: dict[str, int] = model["vocab"]
    listed = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    merges = [(left, right) for left, right in listed]
    products = [vocab.get(left + right, -1) for left, right in merges]
    if any(later < earlier for earlier, later in itertools.pairwise(products)):
        return None
    merging = tokenizers.models.BPE(vocab=vocab, merges=merges)
    added = {token["content"] for token in spec.get("added_tokens", ())}
    ranks: dict[bytes, int] = {}
    for token, token_id in vocab.items():
        spelled = byte_level_bytes(token)
        if not spelled:
            continue  # an added token, never made by merging
        parts = merging.tokenize(token)
        if len(parts) != 1:
            if not model.get("ignore_merges") or token in added:
                continue
            if len(parts) == 2:
                return None
        if spelled in ranks:
            return None
        ranks[spelled] = token_id
    return ranks


# All code points that are assigned today or may be soon, without the surrogates and the empty planes 4 to 13.
_CODE_POINTS = "".join(
    map(chr, [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x34000), *range(0xE0000, 0xE0200)])
)


def _members(text: str) -> bytearray:
    """A flag for each code point, set where `text` has it: sets of so many strings would take tens of megabytes."""
    flags = bytearray(0x110000)
    for point in map(ord, text):
        flags[point] = 1
    return flags


def _class_by_tiktoken(name: str) -> bytearray:
    bytes_only = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("class", pat_str=f"{name}+", mergeable_ranks=bytes_only, special_tokens={})
    return _members(bytes(encoding.encode_ordinary(_CODE_POINTS)).decode())  # text outside matches is dropped


@functools.cache
def _disputed(name: str) -> str | None:
    """Characters that the two regex engines (each with its own Unicode version) put on different sides of a class."""
    try:
        kept = _members(normalizers.Replace(tokenizers.Regex(f"{name}+"), "").normalize_str(_CODE_POINTS))
        by_tiktoken = _class_by_tiktoken(name)
    except Exception:  # a class that one of them does not know
        return None
    return "".join(c for c in _CODE_POINTS if by_tiktoken[ord(c)] == kept[ord(c)])


@functools.cache
def _disputed_digits() -> str:
    r"""Characters on which the Digits pre-tokenizer (Rust's own tables) and \p{N} differ."""
    cut = pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str(_CODE_POINTS)
    # Neighbouring pieces alternate between digits and others; the text starts with a control character.
    digits = _members("".join(piece for piece, _ in cut[1::2]))
    by_tiktoken = _class_by_tiktoken(r"\p{N}")
    return "".join(c for c in _CODE_POINTS if digits[ord(c)] != by_tiktoken[ord(c)])


def _agree(encoder: TiktokenEncoder, oracle: tokenizers.Tokenizer) -> bool:
    for text in sample_texts():
        ids = encoder.encode(text)
        if ids is not None and ids != oracle.encode(text, add_special_tokens=False).ids:
            return False
    return True
