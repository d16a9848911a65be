"""Tokenizers built from GGUF metadata: against transformers' own conversion, and on small vocabularies by hand."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from noria.engine.models.errors import ModelError
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_tokenizer import gguf_tokenizer_files
from noria.engine.models.source import resolve

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

TEXTS = [
    "",
    "Hello, world!",
    "The capital of France is Paris.\n\n  It's 1889 metres?\t\tI'll say: don't",
    "def f(x):\n    return x ** 2  # square\n",
    "naïve café — Ωmega 東京 🙂👨‍👩‍👧 مرحبا",
    "<|im_start|>user\nhi<|im_end|>\n",
    "   leading and trailing   ",
    "a\r\nb\u00a0c\u2003d",
]


def write_gguf(path: Path, kind: str, tokens: list[str], types: list[int], **more: object) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "pre" in more:
        writer.add_tokenizer_pre(str(more["pre"]))
    if "merges" in more:
        writer.add_token_merges(more["merges"])
    if "scores" in more:
        writer.add_token_scores(more["scores"])
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def byte_level_vocabulary() -> list[str]:
    """The 256 printable spellings of bytes, in byte order of GPT-2's table."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def test_demo_tokenizer_equals_transformers() -> None:
    path = resolve("smollm2-135m-instruct").path
    files = gguf_tokenizer_files(GGUFFile(path))
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in [*TEXTS[:2], *TEXTS[3:]]:  # transformers leaves the file's pre-tokenizer aside: no digits here
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (files.bos_token, files.eos_token, files.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert files.chat_template is not None and "<|im_start|>" in files.chat_template
    added = tokenizer.get_added_tokens_decoder()
    assert added[1].content == "<|im_start|>" and added[1].special


def test_smollm_splits_every_digit() -> None:
    files = gguf_tokenizer_files(GGUFFile(resolve("smollm2-135m-instruct").path))
    tokens = Tokenizer.from_str(files.tokenizer_json).encode(" 1889x", add_special_tokens=False).tokens
    assert tokens == ["Ġ", "1", "8", "8", "9", "x"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "!!", "Ċ", "Ċ", "x"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!!", "Ċ", "Ċ", "x"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "!!ĊĊ", "x"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "x"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "x"]),
    ],
)
def test_pre_tokenizers_cut_words(tmp_path: Path, pre: str, words: list[str]) -> None:
    file = write_gguf(tmp_path / "m.gguf", "gpt2", byte_level_vocabulary(), [NORMAL] * 256, pre=pre)
    tokenizer = Tokenizer.from_str(gguf_tokenizer_files(file).tokenizer_json)
    assert tokenizer.pre_tokenizer is not None
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's 12345!!\n\nx")] == words


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0, "▁a": -3.0, "abc": -4.0}
    file = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        [*tokens, *pieces],
        types + [NORMAL] * len(pieces),
        scores=[0.0] * len(tokens) + list(pieces.values()),
    )
    files = gguf_tokenizer_files(file)
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    # "bc" has the best score, so it is merged before "ab" can be; then "▁a".
    assert tokenizer.encode("abc", add_special_tokens=False).tokens == ["▁a", "bc"]
    assert tokenizer.encode("aé", add_special_tokens=False).tokens == ["▁a", "<0xC3>", "<0xA9>"]
    for text in ("abc abc", "é 東京", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert files.add_bos


def test_user_defined_tokens_are_matched_whole_and_stay_visible(tmp_path: Path) -> None:
    tokens = [*byte_level_vocabulary(), "<think>", "<|end|>"]
    types = [NORMAL] * 256 + [USER_DEFINED, CONTROL]
    file = write_gguf(tmp_path / "m.gguf", "gpt2", tokens, types, pre="qwen2")
    tokenizer = Tokenizer.from_str(gguf_tokenizer_files(file).tokenizer_json)
    ids = tokenizer.encode("<think><|end|>", add_special_tokens=False).ids
    assert ids == [256, 257]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>"


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", "gpt2", ["a", "b"], [NORMAL] * 2, pre="martian")
    with pytest.raises(ModelError, match=r"a\.gguf: pre-tokenizer 'martian'"):
        gguf_tokenizer_files(file)
    with pytest.raises(ModelError, match=r"b\.gguf: tokenizer model 'bert'"):
        gguf_tokenizer_files(write_gguf(tmp_path / "b.gguf", "bert", ["a", "b"], [NORMAL] * 2))
