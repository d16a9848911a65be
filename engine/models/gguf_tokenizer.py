"""A GGUF file's vocabulary as a tokenizer in the `tokenizers` library's format.

Knows llama.cpp's metadata keys and the two kinds of vocabulary that Llama-family files carry; not the model.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.wire.messages import TokenizerFiles

_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS_BY_PRE = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_CONTRACTIONS + _WORDS % "{1,3}",),
    "qwen2": (_CONTRACTIONS + _WORDS % "",),
    "tekken": (_TEKKEN,),
}
"""`tokenizer.ggml.pre` -> patterns that cut the text into words, each applied to the pieces of the one before."""

_SAME_PRE = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")  # a word that is in the vocabulary is not merged up from bytes
_BOS_BY_DEFAULT = ("llama-bpe", "tekken")  # where the file does not say whether a BOS token starts the text


class _TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def gguf_tokenizer_files(file: GGUFFile) -> TokenizerFiles:
    """Build the tokenizer that the file's metadata describes. ModelError when it is of no kind that is known."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path}: no tokenizer in the file")
    if kind == "gpt2":
        pre = _pre_tokenizer_name(file.path, metadata)
        tokenizer, add_bos = _byte_level(file.path, metadata, pre), pre in _BOS_BY_DEFAULT
    elif kind == "llama":
        tokenizer, add_bos = _sentence_piece(file.path, metadata), True
    else:
        raise ModelError(f"{file.path}: tokenizer model {kind!r} is not supported (gpt2, llama)")
    _add_whole_tokens(tokenizer, metadata)
    names = {name: _spelling(metadata, key) for name, key in (("unk_token", "unknown"), ("pad_token", "padding"))}
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=_spelling(metadata, "bos"),
        eos_token=_spelling(metadata, "eos"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        special_tokens={name: token for name, token in names.items() if token is not None},
    )


def _pre_tokenizer_name(path: Path, metadata: dict[str, Any]) -> str:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    pre = _SAME_PRE.get(pre, pre)
    if pre not in _SPLITS_BY_PRE:
        raise ModelError(f"{path}: pre-tokenizer {pre!r} is not supported ({', '.join(_SPLITS_BY_PRE)})")
    return pre


def _byte_level(path: Path, metadata: dict[str, Any], pre: str) -> Tokenizer:
    """Byte-level BPE, as of GPT-2: the vocabulary spells bytes as printable characters."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = _bpe(path, metadata, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS_BY_PRE[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE: merges follow from the scores of the pieces; unknown characters fall back to bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.scores is missing or of another length than the tokens")
    tokenizer = _bpe(
        path,
        metadata,
        _merges_by_score(tokens, scores.tolist()),
        unk_token=_spelling(metadata, "unknown") or "<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two pieces, best-scored result first; SentencePiece merges in that order."""
    ids = {token: index for index, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(path: Path, metadata: dict[str, Any], merges: list[Any], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: broken tokenizer ({error})") from error


def _add_whole_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Tokens that are matched whole. Control tokens are special; user-defined ones are ordinary visible text."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return
    special, visible = [], []
    for token, kind in zip(metadata["tokenizer.ggml.tokens"], types.tolist(), strict=False):
        if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _TokenType.USER_DEFINED:
            visible.append(AddedToken(token, normalized=False, special=False))
    # All at once: the library sorts out what it has each time.
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(visible)


def _spelling(metadata: dict[str, Any], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None
